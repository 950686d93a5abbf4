"""Gated delta-net layers (Qwen3-Next) among layers of gated attention, for Megatron's local layers over packed rows.

    hidden ──in──▶ [query | key | values | gates | beta | alpha] of each key head
                      └── causal convolution, silu ──┘             ──delta rule──▶ norm x silu(gate) ──out──▶ hidden

Rows are cut over tensor-parallel ranks by key heads, each with its value heads, and all that is of one key head is
together: a rank's part is a slice of the whole. Megatron's own layer refuses packed rows and needs kernels of
flash-linear-attention; this one is torch alone (`delta_rule.py`). A state is not handed over context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from streamrl.learner.attention import PackedSegments
from streamrl.learner.delta_rule import delta_rule
from streamrl.learner.norm import PlainRMSNorm
from streamrl.learner.sequences import sequences_of

L2_EPS = 1e-6  # under the root of a query's or key's length

# (inputs of the convolution before the next token [n, kernel - 1, channels], state [n, heads, key, value])
Before = tuple[Tensor, Tensor]


class GatedAttention(SelfAttention):
    """Megatron's, with the gate on its outputs without a compiler."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class DeltaNet(MegatronModule):
    """In the place of Megatron's self-attention; sizes by the names of its configuration (`linear_...`)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        ranks = self.groups.tp.size()
        self._heads = config.linear_num_key_heads // ranks  # of keys, on this rank
        self._values = config.linear_num_value_heads // config.linear_num_key_heads  # value heads of one
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        self._kernel = config.linear_conv_kernel_dim
        mixed = 2 * self._key + self._values * self._value  # through the convolution, of one key head
        self._parts = [mixed, self._values * self._value, self._values, self._values]
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        like = {"dtype": config.params_dtype, "device": device}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            config.linear_num_key_heads * sum(self._parts),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.groups.tp,
        )
        self.conv = nn.Parameter(torch.empty(self._heads * mixed, 1, self._kernel, **like))
        self.A_log = nn.Parameter(torch.empty(self._heads * self._values, **like))
        self.dt_bias = nn.Parameter(torch.empty(self._heads * self._values, **like))
        for parameter in (self.conv, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = PlainRMSNorm(config, self._value, config.layernorm_epsilon)
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self._value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.groups.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] of this rank's tokens -> the same, and no bias. A packed row has b = 1."""
        projected, _bias = self.in_proj(hidden_states)
        if packed_seq_params is None:
            output = self._mix(projected.transpose(0, 1), None, None)[0].transpose(0, 1)
        else:
            assert isinstance(packed_seq_params, PackedSegments), "the local layers' description of a row"
            output = self._by_blocks(projected.squeeze(1), packed_seq_params).unsqueeze(1)
        mixed: tuple[Tensor, Tensor | None] = self.out_proj(output)
        return mixed

    def _by_blocks(self, projected: Tensor, packed: PackedSegments) -> Tensor:
        """[T, of in_proj] -> [T, of out_proj]."""
        output = projected.new_zeros(len(projected), self._heads * self._parts[1])
        ends: list[Before] = []
        before_all: Before | None = None
        for block in sequences_of(packed, projected.device):
            before = None
            if block.parents is not None:
                before_all = before_all or (torch.cat([tail for tail, _ in ends]), torch.cat([s for _, s in ends]))
                before = before_all[0][block.parents], before_all[1][block.parents]
            mixed, end = self._mix(projected[block.tokens], block.real, before)
            ends.append(end)
            output = output.index_copy(0, block.tokens[block.real], mixed[block.real])
        return output

    def _mix(self, projected: Tensor, real: Tensor | None, before: Before | None) -> tuple[Tensor, Before]:
        """projected [n, t, of in_proj], real bool [n, t] (None: all) -> outputs [n, t, of out_proj], what follows."""
        mixed, gate, beta, alpha = projected.unflatten(-1, (self._heads, -1)).split(self._parts, -1)
        mixed, (beta, alpha) = mixed.flatten(2), (x.flatten(2) for x in (beta, alpha))
        tail = mixed.new_zeros(len(mixed), self._kernel - 1, mixed.size(-1)) if before is None else before[0]
        whole = torch.cat([tail, mixed], 1)
        turned = silu(conv1d(whole.transpose(1, 2), self.conv, groups=len(self.conv))).transpose(1, 2)
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
        return output, (self._tail(whole, real), state)

    def _tail(self, whole: Tensor, real: Tensor | None) -> Tensor:
        """Inputs of the convolution that the token behind each sequence's last sees; whole [n, kernel - 1 + t, c]."""
        if real is None:
            return whole[:, whole.size(1) - self._kernel + 1 :]
        places = real.sum(1, keepdim=True) + torch.arange(self._kernel - 1, device=whole.device)
        return whole.gather(1, places.unsqueeze(-1).expand(-1, -1, whole.size(-1)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a checkpoint is told: a rank has its heads'."""
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {"conv": self.conv, "A_log": self.A_log, "dt_bias": self.dt_bias}
        sharded |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded


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
