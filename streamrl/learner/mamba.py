"""Hybrid layers (Nemotron-H), each of one part: Mamba-2, attention, an MLP or experts, with one norm before it.

    Mamba-2:  hidden ──in──▶ [gate | value | write | read | step] of each group of heads
                                    └ causal convolution, silu ┘   ──scan──▶ norm(y silu(gate)) ──out──▶ hidden

They are Megatron's transformer layers without the half that a layer has not. Megatron's own Mamba layer needs kernels
of mamba_ssm and causal_conv1d; this one is torch alone, or has the first one's scan (`mamba_scan.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import relu, rms_norm, silu, softplus

from streamrl.learner.mamba_scan import scan
from streamrl.learner.mamba_shape import ATTENTION, MAMBA, MambaShape
from streamrl.learner.recurrent_mixer import Before, RecurrentMixer


class Mamba2(RecurrentMixer):
    """What a Mamba-2 layer has in the place of Megatron's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        shape: MambaShape,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config, pg_collection, projected=shape.projected, width=shape.inner, kernel=shape.kernel)
        self._groups, self._head = shape.groups // self.ranks, shape.head
        inner, state = shape.inner // shape.groups, shape.state  # of one group
        self._mixed = [inner, state, state]
        self._parts = [inner, sum(self._mixed), shape.heads // shape.groups]
        self.conv = self.own(shape.channels, 1, shape.kernel)
        self.conv_bias = self.own(shape.channels)
        self.A_log = self.own(shape.heads)
        self.dt_bias = self.own(shape.heads)
        self.D = self.own(shape.heads)
        self.norm = self.own(shape.inner)

    def mix(self, projected: Tensor, real: Tensor | None, before: Before | None) -> tuple[Tensor, Before]:
        gate, mixed, step = projected.unflatten(-1, (self._groups, -1)).split(self._parts, -1)
        turned, tail = self.convolve(mixed.flatten(2), self.conv, self.conv_bias, real, before)
        value, write, read = turned.float().unflatten(-1, (self._groups, -1)).split(self._mixed, -1)
        value = value.unflatten(-1, (-1, self._head)).flatten(2, 3)  # [n, t, heads, head]
        step = softplus(step.flatten(2).float() + self.dt_bias.float())
        if real is not None:
            step = step * real.unsqueeze(-1)
        rate = -self.A_log.float().exp()
        output, state = scan(value, step, rate, write, read, None if before is None else before[1])
        output = (output + self.D.float().unsqueeze(-1) * value).flatten(2) * silu(gate.flatten(2).float())
        output = output.unflatten(-1, (self._groups, -1))
        output = rms_norm(output, output.shape[-1:], None, self.config.layernorm_epsilon).flatten(2)
        return (output * self.norm.float()).to(projected.dtype), (tail, state)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2: Megatron's own asks for a compiler."""
    return torch.square(relu(x))


def keep_one_part(layer: ModuleSpec, shape: MambaShape, number: int) -> None:
    """Leave a layer that is yet to be built the part that the model's layer `number`, from 0, is."""
    parts: Any = layer.submodules
    kind = shape.kinds[number]
    if kind in (MAMBA, ATTENTION):
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
    else:
        parts.input_layernorm, parts.self_attention, parts.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
    if kind == MAMBA:
        parts.self_attention = ModuleSpec(Mamba2, params={"shape": shape})
