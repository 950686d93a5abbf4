"""Core attention over the segments of a packed row, and the RMS norm, for layers without Transformer Engine.

Megatron's own core attention refuses packed (thd) input, and its torch norm refuses sequence parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

PADDING = 1.5
"""A block's scores, pads included, are at most this many times the real ones: pads cost arithmetic."""

SMALL_BLOCK = 1 << 16
"""Scores up to which padding does not matter: a call of its own would cost as much (about 50 us a layer)."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Segments of about one length that one attention call takes, padded.

    Example: segments of 3 and 2 tokens behind prefixes of 4 make `count=2, queries=3, keys=7`.
    """

    count: int
    queries: int  # longest segment
    keys: int  # longest prefix + longest segment
    tokens: Tensor  # int64 [t], places in the row of the segments' tokens
    slots: Tensor  # int64 [t], their places in the padded [count * queries]
    key_tokens: Tensor  # int64 [u], places in the row of the prefixes' and the segments' tokens
    key_slots: Tensor  # int64 [u], their places in the padded [count * keys]
    mask: Tensor | None  # bool [count, 1, queries, keys], what is seen; None: causal, there are no prefixes


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed row, with what the core attention needs, worked out once for all layers.

    Its `cu_seqlens` say that the row is one sequence: in the local layers only RoPE reads them, and the
    angles that it gets are already those of each token's own position.
    """

    blocks: tuple[Block, ...] = ()
    # For the varlen kernel: where segments and their keys end, int32 [B + 1], the longest of both, and the
    # places of the keys in the row, int64 [u], one segment after the other; None: as the queries.
    query_ends: Tensor | None = None
    key_ends: Tensor | None = None
    longest: tuple[int, int] = (0, 0)
    key_tokens: Tensor | None = None


def describe_row(segments: np.ndarray, device: torch.device) -> PackedSegments:
    """What the local layers need to know of a packed row.

    segments: int64 [B, 4], (start, length, prefix start, prefix length) in the order of the row.
    """
    lengths, prefixes = segments[:, 1], segments[:, 3]
    keys = lengths + prefixes
    row = _cumulative(lengths.sum(keepdims=True), device)
    key_tokens = np.concatenate([_seen_by(segment) for segment in segments]) if prefixes.any() else None
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=row,
        cu_seqlens_kv=row,
        max_seqlen_q=int(keys.max()),  # how long Megatron makes its table of RoPE angles
        max_seqlen_kv=int(keys.max()),
        blocks=tuple(_block(members, device) for members in block_segments(segments)),
        query_ends=_cumulative(lengths, device),
        key_ends=_cumulative(keys, device),
        longest=(int(lengths.max()), int(keys.max())),
        key_tokens=None if key_tokens is None else torch.from_numpy(key_tokens).to(device),
    )


def describe_row_for_engine(segments: np.ndarray, device: torch.device) -> PackedSeqParams:
    """The same for Transformer Engine's layers, which know sequences and no shared prefixes."""
    ends, longest = _cumulative(segments[:, 1], device), int(segments[:, 1].max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _cumulative(lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _seen_by(segment: np.ndarray) -> np.ndarray:
    """Places in the row that a segment's last token sees, its prefix first."""
    start, length, prefix_start, prefix = segment
    return np.concatenate([np.arange(prefix_start, prefix_start + prefix), np.arange(start, start + length)])


def block_segments(segments: np.ndarray) -> list[np.ndarray]:
    """Sort segments by length and cut them into blocks that pad little: int64 [n, 4] each.

    Segments with and without a prefix are never in one block.
    """
    blocks = []
    for part in (segments[segments[:, 3] == 0], segments[segments[:, 3] > 0]):
        ordered = part[np.lexsort((part[:, 3], part[:, 1]))[::-1]]
        begin = 0
        while begin < len(ordered):
            end = begin + _fitting(ordered[begin:])
            blocks.append(ordered[begin:end])
            begin = end
    return blocks


def _fitting(ordered: np.ndarray) -> int:
    """How many of these segments, longest first, may share a block."""
    lengths, prefixes = ordered[:, 1], ordered[:, 3]
    real = np.cumsum(lengths * (lengths + prefixes))
    padded = np.arange(1, len(ordered) + 1) * lengths[0] * (lengths[0] + np.maximum.accumulate(prefixes))
    fits = padded <= np.maximum(PADDING * real, SMALL_BLOCK)
    return max(1, len(fits) if fits.all() else int(np.argmin(fits)))


def _block(segments: np.ndarray, device: torch.device) -> Block:
    starts, lengths, prefix_starts, prefixes = segments.T[..., None]
    longest, longest_prefix = int(lengths.max()), int(prefixes.max())
    within = np.arange(longest)
    real = within < lengths  # [n, queries]
    # A prefix stands against the right edge of its space, so that one causal rule holds for all rows.
    before = np.arange(longest_prefix) - (longest_prefix - prefixes)
    key_real = np.concatenate([before >= 0, real], 1)  # [n, keys]
    key_places = np.concatenate([prefix_starts + before, starts + within], 1)
    mask = None
    if longest_prefix:
        causal = np.arange(longest_prefix + longest) <= longest_prefix + within[:, None]
        mask = torch.from_numpy((key_real[:, None] & causal)[:, None]).to(device)

    def index(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Block(
        count=len(segments),
        queries=longest,
        keys=longest_prefix + longest,
        tokens=index((starts + within)[real]),
        slots=index(np.flatnonzero(real)),
        key_tokens=index(key_places[key_real]),
        key_slots=index(np.flatnonzero(key_real)),
        mask=mask,
    )


class PackedAttention(MegatronModule):
    """Causal attention for Megatron's local layers: packed rows (thd) and plain batches (sbhd).

    On CUDA with half precision a packed row is one call of torch's varlen flash attention; otherwise its
    blocks are padded and go through `scaled_dot_product_attention`.
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

    def forward(  # noqa: PLR0917 (Megatron's signature)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """Packed: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d].

        Plain: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].
        """
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query, key, value, packed_seq_params)
        return self._blockwise(query, key, value, packed_seq_params.blocks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [b, heads, s, d], key and value [b, groups, u, d] -> [b, heads, s, d]; causal without a mask."""
        dtype = query.dtype
        if query.device.type == "cpu":
            # torch's bfloat16 kernel for CPUs takes five times as long in the backward pass of short segments.
            query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.to(dtype)

    def _blockwise(self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        output = torch.zeros_like(query)
        for block in blocks:
            q = _padded(query, block.tokens, block.slots, (block.count, block.queries))
            k, v = (_padded(x, block.key_tokens, block.key_slots, (block.count, block.keys)) for x in (key, value))
            attended = self._attend(q, k, v, block.mask).transpose(1, 2).flatten(0, 1)
            output = output.index_copy(0, block.tokens, attended.index_select(0, block.slots))
        return output.flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments) -> Tensor:
        assert packed.query_ends is not None
        if packed.key_tokens is not None:
            key, value = (x.index_select(0, packed.key_tokens) for x in (key, value))
        repeat = query.size(1) // key.size(1)
        if repeat > 1:  # torch 2.11 has no grouped heads here
            key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        output = varlen_attn(
            query,
            key,
            value,
            packed.query_ends,
            packed.key_ends,
            *packed.longest,
            scale=self.scale,
            window_size=(-1, 0),  # causal, counted from the ends of segment and keys
        )
        assert isinstance(output, Tensor)
        return output.flatten(1)


def _padded(packed: Tensor, tokens: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Tokens of [T, heads, d] as [count, heads, length, d], zeros in the pads."""
    rows = packed.new_zeros(shape[0] * shape[1], *packed.shape[1:])
    rows = rows.index_copy(0, slots, packed.index_select(0, tokens))
    return rows.view(*shape, *packed.shape[1:]).transpose(1, 2)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm, whose weight tells Megatron to sum its gradient over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
