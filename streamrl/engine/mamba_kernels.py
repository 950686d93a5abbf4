"""What SGLang 0.5.23 lacks on a CPU machine for models with Mamba-2 layers (Nemotron-H): its kernels are Triton's.

The same in torch, one token after another, with states in float32. Only what servers of a run ask for: sequences with
or without a state, and one token each; no drafts, no snapshots within a prefill. And experts whose activation is
max(x, 0)^2, with their router, which asks for a product of another dtype.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.engine import stand_ins
from streamrl.engine.model_config import read

if TYPE_CHECKING:
    from torch import Tensor

# Kernels of delta nets that SGLang names where it chooses what hybrid models have in the place of attention.
NAMED = (
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "fused_gdn_gating_cpu",
)

# States are kept where sequences end, not within them; SGLang's scheduler must not run ahead of them then.
ARGUMENTS = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")

# What SGLang keeps of a convolution's inputs is bfloat16 unless it is told.
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"


def has_mamba(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with Mamba-2 layers."""
    return read(model).get("mamba_num_heads") is not None


def install() -> None:
    """In SGLang's process, before its model is built."""
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.models import nemotron_h

    stand_ins.name_kernels(NAMED)
    os.environ.setdefault(CONV_DTYPE, "float32")
    for name, kernel in {
        "causal_conv1d_fn": convolve,
        "causal_conv1d_update": convolve_next,
        "mamba_chunk_scan_combined": scan,
        "selective_state_update": scan_next,
    }.items():
        setattr(mamba, name, kernel)
        if "conv1d" in name:
            setattr(mamba, f"{name}_triton", kernel)
    fused_moe_native.moe_forward_native = _with_squared_relu(fused_moe_native.moe_forward_native)
    nemotron_h.NemotronHMoE._forward_core = _route


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """silu of the causal convolution of sequences x [c, t], which lie behind one another, with weight [c, w].

    conv_states [slots, c, w - 1]: inputs before a sequence, and then before its next token, in its slot.
    """
    import torch

    before = weight.size(1) - 1
    ends, outputs = query_start_loc.tolist(), []
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        state = conv_states[cache_indices[index]]
        known = has_initial_state is not None and bool(has_initial_state[index])
        tail = state if known else torch.zeros_like(state)
        row = torch.cat([tail.to(x.dtype), x[:, start:end]], 1)
        conv_states[cache_indices[index]] = row[:, row.size(1) - before :].to(conv_states.dtype)
        outputs.append(torch.nn.functional.conv1d(row[None], weight[:, None], bias, groups=len(weight))[0])
    return torch.nn.functional.silu(torch.cat(outputs, 1))


def convolve_next(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, conv_state_indices: Tensor
) -> Tensor:
    """`convolve` for one further token x [n, c] of each sequence."""
    import torch

    row = torch.cat([conv_state[conv_state_indices].to(x.dtype), x[:, :, None]], 2)
    conv_state[conv_state_indices] = row[:, :, 1:].to(conv_state.dtype)
    output = (row * weight).sum(-1)
    return torch.nn.functional.silu(output if bias is None else output + bias)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    state_dtype: Any,
    **_: Any,
) -> tuple[None, Tensor, None]:
    """Scan sequences x [1, t, h, p] behind one another, dt [1, t, h], B and C [1, t, g, s]. Outputs go into `out`; the
    states [n, h, p, s] are those behind their last tokens.
    """
    import torch

    ends, states = cu_seqlens.tolist(), []
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        shape = (1, *x.shape[2:], B.size(-1))
        state = torch.zeros(shape) if initial_states is None else initial_states[index : index + 1].float()
        for token in range(start, end):
            state, out[:, token] = _step(state, x[:, token], dt[:, token], A, B[:, token], C[:, token], D, dt_bias)
        states.append(state)
    return None, torch.cat(states).to(state_dtype), None


def scan_next(  # noqa: PLR0917 (as SGLang calls it)
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: Any,
) -> None:
    """`scan` for one further token x [n, h, p] of each sequence; values of a head are repeated over its width."""
    after, output = _step(state[state_batch_indices].float(), x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0])
    state[state_batch_indices] = after.to(state.dtype)
    out.copy_(output.reshape(out.shape))


def _step(  # noqa: PLR0917
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """state [n, h, p, s], x [n, h, p], dt [n, h], A, D, dt_bias [h], B and C [n, g, s] -> the next state, outputs."""
    import torch

    heads = x.size(1) // B.size(1)
    write, read = (each.float().repeat_interleave(heads, 1) for each in (B, C))
    step = torch.nn.functional.softplus(dt.float() + dt_bias.float())
    value = x.float()
    kept = (step * A).exp()[..., None, None] * state
    state = kept + (step[..., None] * value)[..., None] * write[:, :, None]
    return state, (state @ read[..., None])[..., 0] + D.float()[:, None] * value


def _with_squared_relu(others: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SGLang's experts without kernels, and those that it has none for."""

    def experts(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        if moe_runner_config.activation != "relu2":
            return others(layer, x, topk_output, moe_runner_config)
        scale = 1.0 if layer.should_fuse_routed_scaling_factor_in_topk else moe_runner_config.routed_scaling_factor
        return squared_relu_experts(x, topk_output[0] * scale, topk_output[1], layer.w13_weight, layer.w2_weight)

    return experts


def squared_relu_experts(x: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Outputs [t, h] for tokens x [t, h] with experts `chosen`, `weights` [t, k]; up [e, f, h], down [e, h, f]."""
    import torch

    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen[chosen >= 0].unique().tolist():
        tokens, places = torch.where(chosen == expert)
        inner = torch.relu(x[tokens] @ up[expert].t()).square()
        output.index_add_(0, tokens, weights[tokens, places, None].float() * (inner @ down[expert].t()).float())
    return output.to(x.dtype)


def _route(self: Any, hidden_states: Tensor, forward_batch: Any = None) -> tuple[Tensor, Tensor | None]:
    """In the place of NemotronHMoE's `_forward_core`: what experts add, what shared experts do."""
    logits = hidden_states.float() @ self.gate.weight.float().t()
    shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
    return self.experts(hidden_states, self.topk(hidden_states, logits)), shared
