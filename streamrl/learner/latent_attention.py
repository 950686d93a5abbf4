"""Multi-head latent attention (arXiv 2405.04434, section 2.1) for Megatron's local layers, over packed rows.

    hidden ──kv down──▶ [latent | rotated key] ──norm──▶ latent ──kv up──▶ key without position, value of each head
    hidden ──q down──▶ latent ──norm──▶ ──q up──▶ query of each head        (or one projection, without a latent)

The down projections are whole on every tensor-parallel rank. Megatron's local layers cut them by columns and gather the
outputs, whose backward pass keeps each rank's own part of the gradient: the rotated key is shared by the heads of all
ranks, so the others' parts were lost, silently. Its own module also counts positions by place in the row. Names of
parameters are Megatron's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from streamrl.learner.attention import PackedAttention
from streamrl.learner.norm import RMSNorm


class WholeLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole, for the tokens that it has."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        # With sequence parallelism a rank sees some of the tokens: Megatron sums such gradients over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass
class LatentSubmodules:
    """What the layer's parallel parts are made of; adapters take the place of `linear_proj`."""

    linear_up: Any = ColumnParallelLinear
    core_attention: Any = PackedAttention
    linear_proj: Any = RowParallelLinear


class LatentAttention(MegatronModule):
    """In the place of Megatron's self-attention; sizes by the names of its MLATransformerConfig."""

    config: MLATransformerConfig

    def __init__(  # noqa: PLR0917 (Megatron's signature)
        self,
        config: MLATransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._heads = config.num_attention_heads // self.groups.tp.size()
        self._query = config.qk_head_dim + config.qk_pos_emb_head_dim  # width of a head's query and key
        # The two are together in what is published (publish/staging.py:JOINED).
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        down = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, down, config)
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(submodules, config.hidden_size, self._query)
        else:
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = self._up(submodules, config.q_lora_rank, self._query)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, config.layernorm_epsilon)
        self.linear_kv_up_proj = self._up(submodules, config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            pg_collection=self.groups,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * config.v_head_dim,
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
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] of this rank's tokens -> the same, and no bias. A packed row has b = 1.

        rotary_pos_emb: angles of all the row's tokens, [T, 1, 1, d].
        """
        query, key, value = self._projected(hidden_states, rotary_pos_emb, packed_seq_params)

        def attend(*given: Tensor) -> Tensor:
            attended: Tensor = self.core_attention(*given, attention_mask, packed_seq_params=packed_seq_params)
            return attended

        modules = self.config.recompute_modules or ()
        if self.training and self.config.recompute_granularity == "selective" and "core_attn" in modules:
            output = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            output = attend(query, key, value)
        if packed_seq_params is not None:
            output = output.unsqueeze(1)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(output)
        return projected

    def _up(self, submodules: LatentSubmodules, inputs: int, width: int) -> nn.Module:
        """From a vector a token to `width` values of each head, cut by heads."""
        module: nn.Module = build_module(
            submodules.linear_up,
            inputs,
            self.config.num_attention_heads * width,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.groups.tp,
        )
        return module

    def _projected(
        self, hidden: Tensor, angles: Tensor, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [..., heads, d], value [..., heads, v] of this rank's heads; [t] or [s, b] before them."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        latent, shared = self.linear_kv_down_proj(hidden).split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        # The heads of all ranks read it: the backward pass sums what each of them has to say.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.groups.tp)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.groups.tp)
        if packed is not None:
            query, both, shared = (each.squeeze(1) for each in (query, both, shared))
        query, both = (each.unflatten(-1, (self._heads, -1)) for each in (query, both))
        plain, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        key, value = both.split([config.qk_head_dim, config.v_head_dim], -1)
        query = torch.cat([plain, self._turn(turned, angles, packed)], -1)
        shared = self._turn(shared.unsqueeze(-2), angles, packed)
        return query, torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1), value

    def _turn(self, heads: Tensor, angles: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """By the rotary embedding."""
        ends = None if packed is None else packed.cu_seqlens_q
        turned: Tensor = apply_rotary_pos_emb(heads, angles, self.config, ends, cp_group=self.groups.cp)
        return turned


# Where a checkpoint by Transformer Engine has the norms: inside the layers behind them, but for a layer's own.
CHECKPOINT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def use_latent_attention(layer: ModuleSpec) -> None:
    """Put it in the place of the self-attention of a layer that is yet to be built."""
    parts: Any = layer.submodules
    parts.self_attention = ModuleSpec(LatentAttention, submodules=LatentSubmodules())
    parts.sharded_state_dict_keys_map = dict(CHECKPOINT_NAMES)
