"""Transformer Engine's layers against plain torch: norms and matrices in float32, packed attention in bfloat16.

Its matrices multiply float32 in TF32 on GPUs that have it, with 10 bits of mantissa: the bar is that of TF32.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional

from streamrl.lab.acceptance.check import Bench, Failed, Measured, Skipped
from streamrl.learner.te import TORCH_PART, te_problem

HIDDEN, OUT, HEADS, GROUPS, HEAD = 256, 512, 8, 4, 64
LENGTHS = (7, 64, 57)  # of the packed sequences
EPS = 1e-6
DEVICE = "cuda"
BAR = 5e-3  # of float32 layers, relative to the largest entry
ATTENTION_BAR = 2e-2  # in bfloat16, which has 8 bits of mantissa

Layers = dict[str, tuple[torch.Tensor, torch.Tensor]]  # what it is: (Transformer Engine's, torch's)


def check_engine(bench: Bench) -> None:
    """Raise Skipped where there is no Transformer Engine that could be looked at."""
    if problem := te_problem():
        raise Skipped(f"Transformer Engine {problem}")
    bench.needs_cuda("Transformer Engine has no kernels on the CPU")


def run(bench: Bench) -> Measured:
    """Outputs and gradients of a norm, a matrix, both fused, and packed attention."""
    check_engine(bench)
    engine = importlib.import_module(TORCH_PART)
    torch.manual_seed(0)
    exact = worst({**norm(engine), **linear(engine), **fused(engine)})
    packed = worst(attention(engine))
    said = f"float32 {exact[1]:.1e} ({exact[0]}), bfloat16 attention {packed[1]:.1e} ({packed[0]})"
    if not (exact[1] <= BAR and packed[1] <= ATTENTION_BAR):
        raise Failed(f"{said} from torch; allowed: {BAR:g} and {ATTENTION_BAR:g}")
    return Measured(said, f"{BAR:g} and {ATTENTION_BAR:g} of the largest entry")


def worst(layers: Layers) -> tuple[str, float]:
    """The pair that differs the most, relative to the largest entry of torch's; inf where one is not finite."""

    def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        apart = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        return float(apart) if bool(torch.isfinite(apart)) else float("inf")

    found = {name: difference(*pair) for name, pair in layers.items()}
    name = max(found, key=found.__getitem__)
    return name, found[name]


def norm(engine: Any) -> Layers:
    layer = _turned(engine.RMSNorm(HIDDEN, eps=EPS, params_dtype=torch.float32, device=DEVICE))
    return _both("norm", layer, layer.weight, lambda x: functional.rms_norm(x, (HIDDEN,), layer.weight, EPS))


def linear(engine: Any) -> Layers:
    layer = engine.Linear(HIDDEN, OUT, bias=False, params_dtype=torch.float32, device=DEVICE)
    return _both("linear", layer, layer.weight, lambda x: x @ layer.weight.t())


def fused(engine: Any) -> Layers:
    """Norm and matrix in one, as of `linear_qkv` and `linear_fc1`."""
    layer = engine.LayerNormLinear(
        HIDDEN, OUT, eps=EPS, bias=False, normalization="RMSNorm", params_dtype=torch.float32, device=DEVICE
    )
    _turned(layer)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), layer.layer_norm_weight, EPS) @ layer.weight.t()

    return _both("norm and linear", layer, layer.weight, plain)


def _turned(layer: Any) -> Any:
    """With other weights than those of its start: a norm's are ones, and would not show."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def _both(name: str, layer: Any, weight: torch.Tensor, plain: Any) -> Layers:
    """Output, gradient of the input and of the weight, by both."""
    given = torch.randn(sum(LENGTHS), HIDDEN, device=DEVICE)
    results = []
    for function in (layer, plain):
        x = given.clone().requires_grad_()
        output = function(x)
        weighted = output * torch.linspace(-1, 1, output.numel(), device=DEVICE).view_as(output)
        x_grad, w_grad = torch.autograd.grad(weighted.sum(), (x, weight))
        results.append((output.detach(), x_grad, w_grad))
    what = (name, f"{name}, gradient of the input", f"{name}, gradient of the weight")
    return {each: (ours, theirs) for each, ours, theirs in zip(what, *results, strict=True)}


def attention(engine: Any) -> Layers:
    """Causal attention over packed sequences, with fewer keys than queries."""
    layer = engine.DotProductAttention(
        HEADS, HEAD, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    total = sum(LENGTHS)
    query = torch.randn(total, HEADS, HEAD, device=DEVICE, dtype=torch.bfloat16)
    key, value = torch.randn(2, total, GROUPS, HEAD, device=DEVICE, dtype=torch.bfloat16).unbind()
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    ours = layer(
        query, key.contiguous(), value.contiguous(), cu_seqlens_q=ends, cu_seqlens_kv=ends,
        max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
    ).view(total, HEADS, HEAD)  # fmt: skip
    return {"attention": (ours, plain_attention(query, key, value))}


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[T, heads, d] by torch in float32, one sequence of LENGTHS after another."""
    repeat = query.size(1) // key.size(1)
    pieces = []
    for q, k, v in zip(*(tensor.float().split(LENGTHS) for tensor in (query, key, value)), strict=True):
        keys, values = (tensor.repeat_interleave(repeat, 1).transpose(0, 1) for tensor in (k, v))
        piece = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
        pieces.append(piece.transpose(0, 1))
    return torch.cat(pieces)
