"""What SGLang 0.5.23 lacks on a CPU machine without `sgl_kernel` for gated delta nets (Qwen3-Next): six kernels.

Plain torch, token by token. States are [slots, heads, value, key], as SGLang's pool has them, and inputs of the
convolution [slots, channels, kernel - 1].
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Which states of a prompt's beginning are kept.
STRATEGY = "--mamba-radix-cache-strategy"

L2_EPS = 1e-6  # under the root of a query's or key's length


def is_delta(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with delta nets. What it lacks, SGLang says."""
    try:
        return json.loads((model / "config.json").read_bytes()).get("linear_num_key_heads") is not None
    except (OSError, ValueError, AttributeError):
        return False


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of a server of such a model: what SGLang chooses by itself, it has on GPUs alone."""
    if any(word.startswith(STRATEGY) for word in given):
        return list(given)
    overlap = "--disable-overlap-schedule"  # which this strategy does not take
    return [*given, STRATEGY, "no_buffer", *([] if overlap in given else [overlap])]


def install() -> None:
    """In SGLang's process, before its modules are imported; nothing where `sgl_kernel` is installed."""
    import torch

    if PathFinder.find_spec("sgl_kernel") is not None:
        return
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")  # else they are rounded to bfloat16
    module: Any = importlib.import_module("sgl_kernel.mamba")
    module.causal_conv1d_fn_cpu = convolve
    module.causal_conv1d_update_cpu = convolve_next
    module.chunk_gated_delta_rule_cpu = extend
    kernels: Any = torch.ops.sgl_kernel
    kernels.fused_gdn_gating_cpu = gates
    kernels.fused_sigmoid_gating_delta_rule_update_cpu = decode
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    fused_norm_gate.rms_norm_gated = gated_norm


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Causal convolution of sequences one after the other, [channels, t]; weight [channels, kernel]."""
    import torch
    from torch.nn.functional import conv1d

    kept, parts = weight.size(1) - 1, []
    for index, (first, last) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        slot = int(cache_indices[index])
        before = conv_states[slot, :, -kept:].to(x.dtype) * has_initial_state[index]
        row = torch.cat([before, x[:, first:last]], 1)
        conv_states[slot, :, -kept:] = row[:, -kept:].to(conv_states.dtype)
        parts.append(conv1d(row[None], weight[:, None], bias, groups=len(x))[0])
    return _activated(torch.cat(parts, 1), activation)


def convolve_next(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """The next token of each of b sequences, [b, channels]."""
    import torch

    kept = weight.size(1) - 1
    row = torch.cat([conv_states[conv_state_indices][..., -kept:].to(x.dtype), x.unsqueeze(-1)], -1)
    states = conv_states[conv_state_indices]
    states[..., -kept:] = row[..., 1:].to(conv_states.dtype)
    conv_states[conv_state_indices] = states
    output = (row * weight).sum(-1)
    return _activated(output if bias is None else output + bias, activation)


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and beta [1, t, heads], of a and b [t, heads]."""
    from torch.nn.functional import softplus

    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Sequences one after the other: q, k [1, t, key heads, key], v [1, t, heads, value], g, beta [1, t, heads]."""
    import torch

    output = torch.empty_like(v)
    query, key = (_of_values(_unit(x[0]), v.size(2)) for x in (q, k))
    for index, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        slot = int(initial_state_indices[index])
        state = initial_state[slot].float()
        for token in range(first, last):
            state, one = _step(state, query[token], key[token], v[0, token].float(), g[0, token], beta[0, token])
            output[0, token] = one.to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def decode(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """The next token of each of b sequences, shapes as `extend`'s with b in the place of t."""
    decay, beta = gates(A_log, a, b, dt_bias)
    query, key = (_of_values(_unit(x[0]), v.size(2)) for x in (q, k))
    state = initial_state_source[initial_state_indices].float()
    state, output = _step(state, query, key, v[0].float(), decay[0], beta[0])
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return output.unsqueeze(0).to(v.dtype)


def gated_norm(
    x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str = "swish", *, eps: float = 1e-6, **_: Any
) -> Tensor:
    """The RMS norm of x [..., d] times the activation of g."""
    from torch.nn.functional import rms_norm

    normal = rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normal * _activated(g.float(), activation)).to(x.dtype)


def _step(  # noqa: PLR0917 (as in the formula)
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the rule: state [..., heads, value, key], query and key [..., heads, key], the others by head."""
    state = state * decay[..., None, None].exp()
    written = beta.unsqueeze(-1) * (value - (state @ key.unsqueeze(-1)).squeeze(-1))
    state = state + written.unsqueeze(-1) * key.unsqueeze(-2)
    return state, (state @ query.unsqueeze(-1)).squeeze(-1) * key.size(-1) ** -0.5


def _of_values(x: Tensor, heads: int) -> Tensor:
    """A key head's vectors for each of its value heads."""
    return x.repeat_interleave(heads // x.size(-2), -2)


def _unit(x: Tensor) -> Tensor:
    import torch

    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    from torch.nn.functional import silu

    return silu(x) if activation in ("silu", "swish") else x
