"""Core attention over packed sequences and the RMS norm, for layers that do not come from Transformer Engine.

Megatron's own core attention refuses packed (thd) input, and its torch norm refuses sequence parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

PADDING = 1.25
"""Sequences share one padded call while its longest is at most this many times its shortest: pads cost
arithmetic (up to 1.25 squared), a call of its own costs some 50 us a layer; short answers differ by little."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of about one length that one attention call takes, padded on the right.

    Example: sequences at 0..3 and 3..5 of the packed row make `count=2, length=3, tokens=[0, 1, 2, 3, 4],
    slots=[0, 1, 2, 3, 4]`; slot 5 is a pad.
    """

    count: int
    length: int
    tokens: Tensor  # int64 [t], places in the packed row
    slots: Tensor  # int64 [t], their places in the padded [count * length]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed row, with the blocks worked out once for all layers."""

    blocks: tuple[Block, ...] = field(default=())


def describe_packing(cu_seqlens: np.ndarray, device: torch.device) -> PackedSequences:
    """What the layers need to know of a packed row. cu_seqlens: int32 [B + 1], from 0 to the row's length T."""
    ends = torch.from_numpy(cu_seqlens).to(device)
    longest = int(np.diff(cu_seqlens).max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=blocks_of(cu_seqlens, device),
    )


def blocks_of(cu_seqlens: np.ndarray, device: torch.device) -> tuple[Block, ...]:
    """Sort the sequences of a row by length and cut them into blocks that pad little."""
    lengths = np.diff(cu_seqlens)
    order = np.argsort(-lengths, kind="stable")
    blocks, first = [], 0
    while first < len(order):
        longest = int(lengths[order[first]])
        last = int(np.searchsorted(-lengths[order], -longest / PADDING, side="right"))
        blocks.append(_block(cu_seqlens, order[first:last], longest, device))
        first = last
    return tuple(blocks)


def _block(cu_seqlens: np.ndarray, members: np.ndarray, longest: int, device: torch.device) -> Block:
    lengths = np.diff(cu_seqlens)[members]
    within = np.arange(longest)
    real = within < lengths[:, None]  # [members, longest]
    tokens = (cu_seqlens[members][:, None] + within)[real]
    slots = np.flatnonzero(real)
    return Block(
        count=len(members),
        length=longest,
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
        slots=torch.from_numpy(slots.astype(np.int64)).to(device),
    )


class PackedAttention(MegatronModule):
    """Causal attention for Megatron's local layers: packed rows (thd) and plain batches (sbhd).

    On CUDA with half precision a packed row is one call of torch's varlen flash attention; otherwise its
    blocks are padded and go through `scaled_dot_product_attention`. A pad stands after every real token
    of its sequence, so the causal mask alone keeps it out of sight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise NotImplementedError(
                f"context parallelism of {config.context_parallel_size} needs Transformer Engine layers"
            )
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d].

        Plain: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].
        """
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if varlen_attn is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query, key, value, packed_seq_params)
        if not isinstance(packed_seq_params, PackedSequences):
            packed_seq_params = describe_packing(packed_seq_params.cu_seqlens_q.cpu().numpy(), query.device)
        return self._blockwise(query, key, value, packed_seq_params.blocks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d] each (key and value: [b, groups, s, d]) -> [b, heads, s, d]."""
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)

    def _blockwise(self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        output = torch.zeros_like(query)
        for block in blocks:
            q, k, v = (_padded(x, block) for x in (query, key, value))
            attended = self._attend(q, k, v).transpose(1, 2).flatten(0, 1)
            output = output.index_copy(0, block.tokens, attended.index_select(0, block.slots))
        return output.flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        repeat = query.size(1) // key.size(1)
        if repeat > 1:  # older torch has no grouped heads here
            key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        output = varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
        )
        return output.flatten(1)


def _padded(packed: Tensor, block: Block) -> Tensor:
    """The block's tokens of [T, heads, d] as [count, heads, length, d], zeros in the pads."""
    rows = packed.new_zeros(block.count * block.length, *packed.shape[1:])
    rows = rows.index_copy(0, block.slots, packed.index_select(0, block.tokens))
    return rows.view(block.count, block.length, *packed.shape[1:]).transpose(1, 2)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm, whose weight tells Megatron to sum its gradient over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]
