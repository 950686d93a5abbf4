"""What a server with `generate.quantization: fp8` does with the bfloat16 weights that it is given: quantise them.

    folder, broadcast, memory, delta ──bfloat16──▶ model.load_weights ──here: e4m3 + scales──▶ SGLang's own loader

SGLang is told that its folder holds FP8 weights in blocks (`OVERRIDE`), so that it makes FP8 parameters, and every way
of weights into them goes through the model's `load_weights`, which is wrapped here: the first weights and each
version are quantised alike, by whole tensors, before SGLang cuts them for its rank. Runs inside SGLang's processes
(`engine/launch.py`). On a machine without CUDA the layers compute as the stand-in of `engine/cpu_fp8.py` does; the
kernels of a GPU, and this module beside them, have never run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from streamrl.engine.block_fp8 import BLOCK, quantise
from streamrl.engine.hardware import has_cuda

if TYPE_CHECKING:
    import torch

FLAG = "--quantize-loads"  # of `streamrl.engine.launch`

# What SGLang would find in the config.json of a folder whose weights are in FP8 by blocks.
OVERRIDE = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
}

# Compute capabilities on which SGLang 0.5.23 leaves such weights as they were loaded. It repacks them below 8.9
# (Marlin) and above 9.0 (scales as powers of two, once): an update would be loaded into what was repacked.
CAPABLE = ((8, 9), (9, 0))

# Layers that SGLang makes one of, by the names of the parts in a Hugging Face folder.
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|down)_proj")

_SCALES = ("weight_scale_inv", "w13_weight_scale_inv", "w2_weight_scale_inv")  # of a linear layer, of experts


def install() -> None:
    """Have every model that SGLang builds in this process from now on quantise what it loads."""
    from sglang.srt.model_loader import loader

    if not has_cuda():
        from streamrl.engine import cpu_fp8

        cpu_fp8.install()
    loader._initialize_model = _quantising(loader._initialize_model)


def _quantising(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_and_wrap(*args: Any, **kwargs: Any) -> Any:
        _check_device()
        model = build(*args, **kwargs)
        wrap(model)
        return model

    return build_and_wrap


def _check_device() -> None:
    """Raises ValueError on a GPU whose weights could be loaded once and not updated."""
    if not has_cuda():
        return
    import torch

    found = torch.cuda.get_device_capability()
    if found not in CAPABLE:
        allowed = " or ".join(f"{major}.{minor}" for major, minor in CAPABLE)
        raise ValueError(
            f"generate.quantization: fp8 on a GPU of compute capability {found[0]}.{found[1]} could not be updated; "
            f"allowed: {allowed} (Ada, Hopper), or null"
        )


def wrap(model: Any) -> None:
    """Have a model of SGLang's, not loaded yet, quantise what it loads. Raises ValueError where nothing would be."""
    layers = quantised_layers(model)
    if not layers:
        raise ValueError("generate.quantization: fp8: the model has no layer in FP8 by blocks; allowed: null")
    for name, scale in _scales(model):
        scale.data.fill_(_unset(scale))
        _whole_blocks(name, model.get_submodule(name))
    native, complete = model.load_weights, False

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        nonlocal complete
        device = next(model.parameters()).device
        result = native(quantised(weights, layers, device), *args, **kwargs)
        if not complete:  # the first weights, all in one call: what they miss, no version would bring
            check_loaded(model)
            complete = True
        return result

    model.load_weights = load_weights


def quantised_layers(model: Any) -> frozenset[str]:
    """Names of the layers whose weights are in FP8, as SGLang calls them."""
    return frozenset(name for name, _ in _scales(model))


def quantised(
    weights: Iterable[tuple[str, torch.Tensor]], layers: frozenset[str], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, by their Hugging Face names; for one of an FP8 layer its e4m3 values, and then its scales.

    What is in e4m3 already, as in a folder of quantised weights, has its scales beside it, and goes as it is.
    """
    for name, weight in weights:
        if is_quantised(name, layers) and weight.dtype.itemsize > 1:
            values, scales = quantise(weight.to(device))
            yield name, values
            yield f"{name}_scale_inv", scales
        else:
            yield name, weight


def is_quantised(name: str, layers: frozenset[str]) -> bool:
    """Whether the weight of this Hugging Face name goes into one of `layers`.

    >>> is_quantised("model.layers.0.self_attn.k_proj.weight", frozenset({"model.layers.0.self_attn.qkv_proj"}))
    True
    """
    module, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return False
    parent, _, last = module.rpartition(".")
    packed = (f"{parent}.{layer}" for layer, parts in PACKED.items() if last in parts)
    expert = _EXPERT.fullmatch(module)
    return module in layers or any(layer in layers for layer in packed) or (expert is not None and expert[1] in layers)


def check_loaded(model: Any) -> None:
    """Raises ValueError where an FP8 layer has got no scales: its weights have other names than are known here."""
    for name, scale in _scales(model):
        if bool((scale.data == _unset(scale)).any()):
            raise ValueError(
                f"generate.quantization: fp8: nothing was loaded into (parts of) {name}, whose weights the folder has "
                "under a name that is not known; allowed: null for this model"
            )


def _scales(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every layer in FP8 by blocks and its scales, one or two a layer."""
    for name, module in model.named_modules():
        for scale in _SCALES:
            found = getattr(module, scale, None)
            if found is not None:
                yield name, found


def _unset(scale: torch.Tensor) -> float:
    """What no scale is: SGLang's own mark in those of linear layers."""
    import torch

    return torch.finfo(scale.dtype).min


def _whole_blocks(name: str, module: Any) -> None:
    """Raises ValueError where SGLang has made other blocks than are quantised here."""
    block = getattr(module.quant_method, "weight_block_size", None)
    if block != [BLOCK, BLOCK]:
        raise ValueError(f"generate.quantization: fp8: {name} is in blocks of {block}; allowed: [{BLOCK}, {BLOCK}]")
