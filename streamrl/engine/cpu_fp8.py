"""A stand-in for the FP8 kernels of SGLang's linear layers, on a machine without CUDA: the same numbers, slowly.

Weights are what their blocks represent, and the rows of the input are rounded in groups of 128, as the kernels do both;
products and sums are in float32. Speed and memory say nothing about a GPU. SGLang itself has kernels for CPUs with
AMX, of which no build is published. Experts have no stand-in: a mixture of experts is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.engine.block_fp8 import dequantise, quantise_activations

if TYPE_CHECKING:
    from torch import Tensor


def install() -> None:
    """Put it in place of the methods of SGLang's `Fp8LinearMethod` in this process."""
    from sglang.srt.layers.quantization import fp8

    fp8.Fp8LinearMethod.process_weights_after_loading = _leave
    fp8.Fp8LinearMethod.apply = _apply
    fp8.Fp8MoEMethod.__init__ = _refuse_experts


def linear(rows: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., K] times quantised weights [N, K], in the dtype of `rows`: [..., N]."""
    flat = quantise_activations(rows.reshape(-1, rows.shape[-1]))
    product = flat @ dequantise(values, scales).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(rows.dtype).reshape(*rows.shape[:-1], -1)


def _apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, layer.weight, layer.weight_scale_inv, bias)


def _leave(method: Any, layer: Any) -> None:
    """The weights stay as they were loaded."""


def _refuse_experts(method: Any, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "generate.quantization: fp8 of a mixture of experts has no stand-in on a machine without CUDA; allowed: null"
    )
