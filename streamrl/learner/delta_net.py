"""Gated delta-net layers (Qwen3-Next) among layers of gated attention, for Megatron's local layers over packed rows.

    hidden ──in──▶ [query | key | values | gates | beta | alpha] of each key head
                      └── causal convolution, silu ──┘             ──delta rule──▶ norm x silu(gate) ──out──▶ hidden

A group of heads is a key head with its value heads. Megatron's own layer refuses packed rows and needs kernels of
flash-linear-attention; this one is torch alone (`delta_rule.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu, softplus

from streamrl.learner.delta_rule import delta_rule
from streamrl.learner.norm import PlainRMSNorm
from streamrl.learner.recurrent_mixer import Before, RecurrentMixer

L2_EPS = 1e-6  # under the root of a query's or key's length


class GatedAttention(SelfAttention):
    """Megatron's, with the gate on its outputs without a compiler."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class DeltaNet(RecurrentMixer):
    """Sizes by the names of Megatron's configuration (`linear_...`)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        heads = config.linear_num_key_heads
        values = config.linear_num_value_heads // heads  # value heads of a key head
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        mixed = 2 * key + values * value  # through the convolution, of one key head
        parts = [mixed, values * value, values, values]
        super().__init__(
            config,
            pg_collection,
            projected=heads * sum(parts),
            width=heads * values * value,
            kernel=config.linear_conv_kernel_dim,
        )
        self._heads, self._values = heads // self.ranks, values
        self._key, self._value, self._parts = key, value, parts
        self.conv = self.own(heads * mixed, 1, config.linear_conv_kernel_dim)
        self.A_log = self.own(heads * values)
        self.dt_bias = self.own(heads * values)
        self.out_norm = PlainRMSNorm(config, value, config.layernorm_epsilon)

    def mix(self, projected: Tensor, real: Tensor | None, before: Before | None) -> tuple[Tensor, Before]:
        mixed, gate, beta, alpha = projected.unflatten(-1, (self._heads, -1)).split(self._parts, -1)
        beta, alpha = (x.flatten(2) for x in (beta, alpha))
        turned, tail = self.convolve(mixed.flatten(2), self.conv, None, real, before)
        sizes = [self._key, self._key, self._values * self._value]
        query, key, value = turned.float().unflatten(-1, (self._heads, -1)).split(sizes, -1)
        query, key = (_unit(x).repeat_interleave(self._values, 2) for x in (query, key))
        decay = -self.A_log.float().exp() * softplus(alpha.float() + self.dt_bias.float())
        beta = beta.sigmoid().float()
        if real is not None:
            decay, beta = decay * real.unsqueeze(-1), beta * real.unsqueeze(-1)
        value = value.unflatten(-1, (self._values, self._value)).flatten(2, 3)
        state = None if before is None else before[1]
        output, state = delta_rule(query, key, value, decay, beta, state)
        output = self.out_norm(output.to(projected.dtype))
        output = (output * silu(gate.reshape(output.shape).float())).to(projected.dtype).flatten(2)
        return output, (tail, state)


class MixerOfLayer:
    """A layer's delta net or its attention, by `linear_attention_freq` of the configuration, a list."""

    def __new__(cls, config: TransformerConfig, submodules: Any, layer_number: int, **rest: Any) -> Any:
        if config.linear_attention_freq[layer_number - 1]:
            return DeltaNet(config, layer_number, **rest)
        return GatedAttention(config, submodules, layer_number, **rest)


def use_delta_net(layer: ModuleSpec) -> None:
    """Let the layer's number decide what a layer that is yet to be built has in the place of self-attention."""
    layer.submodules.self_attention.module = MixerOfLayer


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)
