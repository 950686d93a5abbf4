"""Core attention over the segments of a packed row, for layers without Transformer Engine.

Megatron's own refuses packed (thd) input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from streamrl.learner.vision.tower import RowImages

# A block's scores, pads included, are at most this many times the real ones: pads cost arithmetic.
PADDING = 1.5

# Scores up to which padding does not matter: a call of its own would cost as much (about 50 us a layer).
SMALL_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Segments of about one length that one attention call takes, padded.

    Example: segments of 3 and 2 tokens behind 4 others each make `count=2, queries=3, keys=7`.
    """

    count: int
    queries: int  # longest segment
    keys: int  # longest segment with what is before it
    tokens: Tensor  # int64 [t], places among this rank's queries of the segments' tokens
    slots: Tensor  # int64 [t], their places in the padded [count * queries]
    key_tokens: Tensor  # int64 [u], places among all keys of what the segments see
    key_slots: Tensor  # int64 [u], their places in the padded [count * keys]
    mask: Tensor | None  # bool [count, 1, queries, keys], what is seen; None: causal, nothing is before


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's description of a packed row, which it hands to every layer."""

    routed_experts: Tensor | None = None  # int16 [t, layers, top_k] of this rank's slice: `router_replay.row_experts`
    images: RowImages | None = None


@dataclass
class PackedSegments(PackedRow):
    """Megatron's description of a packed row, with what the core attention needs, worked out once for all layers.

    Its `cu_seqlens` say that the row is one sequence: in the local layers only RoPE reads them, and the
    angles that it gets are already those of each token's own position.
    """

    blocks: tuple[Block, ...] | None = None  # None: the varlen kernel does without, whose masks are quadratic
    # For the varlen kernel: where segments and their keys end, int32 [B + 1], the longest of both, and the
    # places of the keys, int64 [u], one segment after the other; None: as the queries.
    query_ends: Tensor | None = None
    key_ends: Tensor | None = None
    longest: tuple[int, int] = (0, 0)
    key_tokens: Tensor | None = None
    segments: np.ndarray | None = None  # int64 [B, 5], of `Slice.cut`
    sequences: Any = None  # `sequences.sequences_of` this row, once it has been asked for


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a packed row that one context-parallel rank has: two pieces of it, as Megatron cuts a sequence.

    Piece `rank` and its mirror image, of 2 x ranks equal pieces: the first sees little, the last much.
    Example: rank 0 of 2 has tokens 0, 1, 6 and 7 of a row of 8.
    """

    ranks: int = 1
    rank: int = 0

    def tokens(self, row: int) -> np.ndarray:
        """Places in a row of `row` tokens, a multiple of 2 x ranks, of this rank's tokens: int64 [row / ranks]."""
        if self.ranks == 1:
            return np.arange(row)
        pieces = np.arange(row).reshape(2 * self.ranks, -1)
        return np.concatenate([pieces[self.rank], pieces[-1 - self.rank]])

    def tokens_of(self, lengths: np.ndarray) -> np.ndarray:
        """This rank's tokens of a row whose sequences, int64 [B], are cut one by one, as Transformer Engine does it.

        Each length is a multiple of 2 x ranks. Example: rank 0 of 2 has tokens 0, 3 and 4, 5, 10, 11 of [4, 8].
        """
        if self.ranks == 1:
            return np.arange(lengths.sum())
        starts = np.cumsum(lengths) - lengths
        parts = [start + self.tokens(length) for start, length in zip(starts, lengths, strict=True)]
        return np.concatenate(parts)

    def gathered(self, row: int) -> np.ndarray:
        """Where each token of the row is when the ranks' slices come one after the other: int64 [row]."""
        order = np.concatenate([Slice(self.ranks, rank).tokens(row) for rank in range(self.ranks)])
        return np.argsort(order)

    def cut(self, segments: np.ndarray) -> np.ndarray:
        """The segments, int64 [B, 4], as this rank has them, in the order of its slice: int64 [B', 5].

        The columns are (start, length, prefix start, prefix length, before): `before` tokens of the same
        segment are in front of it, on this rank or another.
        """
        whole = np.concatenate([segments, np.zeros_like(segments[:, :1])], 1)
        if self.ranks == 1:
            return whole
        piece = int(segments[:, 1].sum()) // (2 * self.ranks)
        parts = [_within(whole, index * piece, piece) for index in (self.rank, 2 * self.ranks - 1 - self.rank)]
        return np.concatenate(parts)


# The slice of a rank that is alone in its context-parallel group: the row.
WHOLE = Slice()


def _within(segments: np.ndarray, begin: int, length: int) -> np.ndarray:
    """What of the segments, int64 [B, 5], lies within so many tokens from `begin` on."""
    starts, ends = segments[:, 0], segments[:, 0] + segments[:, 1]
    first, last = np.maximum(starts, begin), np.minimum(ends, begin + length)
    part = np.stack([first, last - first, segments[:, 2], segments[:, 3], segments[:, 4] + first - starts], 1)
    return part[last > first]


def is_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a packed row is one call of torch's varlen kernel, and not one of SDPA for each of its blocks."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def describe_row(
    segments: np.ndarray, device: torch.device, part: Slice = WHOLE, *, varlen: bool = False, padded: bool = True
) -> PackedSegments:
    """What the local layers need to know of a packed row, or of this rank's slice of it.

    segments: int64 [B, 4], (start, length, prefix start, prefix length) in the order of the row; varlen: `is_varlen`
    of the attention that reads it; padded: segments of different lengths may share a block.
    """
    row, mine = int(segments[:, 1].sum()), part.cut(segments)
    lengths, earlier = mine[:, 1], mine[:, 3] + mine[:, 4]
    places = _Places.of(part, row)
    ends, longest = _cumulative(np.array([row]), device), int((segments[:, 1] + segments[:, 3]).max())
    key_tokens = None
    if part.ranks > 1 or earlier.any():
        key_tokens = places.keys(np.concatenate([_seen_by(segment) for segment in mine]), device)
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,  # how long Megatron makes its table of RoPE angles
        max_seqlen_kv=longest,
        blocks=None if varlen else tuple(_block(each, places, device) for each in block_segments(mine, padded=padded)),
        query_ends=_cumulative(lengths, device),
        key_ends=_cumulative(lengths + earlier, device),
        longest=(int(lengths.max()), int((lengths + earlier).max())),
        key_tokens=key_tokens,
        segments=mine,
    )


def describe_row_for_engine(segments: np.ndarray, device: torch.device, part: Slice = WHOLE) -> PackedRow:
    """`describe_row` for Transformer Engine's layers, which know sequences and no shared prefixes.

    Of a slice they are told the whole sequences, of which this rank has what `Slice.tokens_of` says. Raises
    ValueError for a sequence that cannot be cut so.
    """
    lengths, pieces = segments[:, 1], 2 * part.ranks
    if part.ranks > 1 and (lengths % pieces).any():
        raise ValueError(f"sequences of {sorted(set(lengths.tolist()))} tokens, not all multiples of {pieces}")
    ends, longest = _cumulative(lengths, device), int(lengths.max())
    padded = ends if part.ranks > 1 else None  # the pads are sequences' last tokens, which no other token sees
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """From places in the row to places among this rank's queries and among the keys of all ranks, int64 [T] each."""

    _queries: np.ndarray  # anything for the tokens of other ranks
    _keys: np.ndarray

    @classmethod
    def of(cls, part: Slice, row: int) -> _Places:
        queries = np.zeros(row, np.int64)
        tokens = part.tokens(row)
        queries[tokens] = np.arange(len(tokens))
        return cls(queries, part.gathered(row))

    def queries(self, tokens: np.ndarray, device: torch.device) -> Tensor:
        return _index(self._queries[tokens], device)

    def keys(self, tokens: np.ndarray, device: torch.device) -> Tensor:
        return _index(self._keys[tokens], device)


def _index(places: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(places.astype(np.int64)).to(device)


def _cumulative(lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _seen_by(segment: np.ndarray) -> np.ndarray:
    """Places in the row that a segment's last token sees, its prefix first."""
    start, length, prefix_start, prefix, before = segment
    return np.concatenate([np.arange(prefix_start, prefix_start + prefix), np.arange(start - before, start + length)])


def block_segments(segments: np.ndarray, *, padded: bool = True) -> list[np.ndarray]:
    """Sort segments, int64 [B, 5], by length and cut them into blocks that pad little: int64 [n, 5] each.

    Not `padded`: those of a block have the same length, and as much before them. Segments with and without something
    before them are never in one block.
    """
    blocks = []
    earlier = segments[:, 3] + segments[:, 4]
    for chosen in (earlier == 0, earlier > 0):
        order = np.lexsort((earlier[chosen], segments[chosen, 1]))[::-1]
        ordered = segments[chosen][order]
        begin = 0
        while begin < len(ordered):
            end = begin + (_fitting if padded else _alike)(ordered[begin:])
            blocks.append(ordered[begin:end])
            begin = end
    return blocks


def _fitting(ordered: np.ndarray) -> int:
    """How many of these segments, longest first, may share a block."""
    lengths, earlier = ordered[:, 1], ordered[:, 3] + ordered[:, 4]
    real = np.cumsum(lengths * (lengths + earlier))
    padded = np.arange(1, len(ordered) + 1) * lengths[0] * (lengths[0] + np.maximum.accumulate(earlier))
    fits = padded <= np.maximum(PADDING * real, SMALL_BLOCK)
    return max(1, len(fits) if fits.all() else int(np.argmin(fits)))


def _alike(ordered: np.ndarray) -> int:
    """How many of these are as long as the first, with as much before them."""
    other = (ordered[:, 1] != ordered[0, 1]) | (ordered[:, 3:].sum(1) != ordered[0, 3:].sum())
    return int(np.argmax(other)) if other.any() else len(ordered)


def _block(segments: np.ndarray, places: _Places, device: torch.device) -> Block:
    starts, lengths, prefix_starts, prefixes, before = segments.T[..., None]
    earlier = prefixes + before
    longest, longest_earlier = int(lengths.max()), int(earlier.max())
    within = np.arange(longest)
    real = within < lengths  # [n, queries]
    # What is before a segment is aligned to the right edge of its space, so that one causal rule holds for all rows.
    index = np.arange(longest_earlier) - (longest_earlier - earlier)
    earlier_places = np.where(index < prefixes, prefix_starts + index, starts - earlier + index)
    key_real = np.concatenate([index >= 0, real], 1)  # [n, keys]
    key_places = np.concatenate([earlier_places, starts + within], 1)
    mask = None
    if longest_earlier:
        causal = np.arange(longest_earlier + longest) <= longest_earlier + within[:, None]
        mask = torch.from_numpy((key_real[:, None] & causal)[:, None]).to(device)
    return Block(
        count=len(segments),
        queries=longest,
        keys=longest_earlier + longest,
        tokens=places.queries((starts + within)[real], device),
        slots=_index(np.flatnonzero(real), device),
        key_tokens=places.keys(key_places[key_real], device),
        key_slots=_index(np.flatnonzero(key_real), device),
        mask=mask,
    )


class PackedAttention(MegatronModule):
    """Causal attention for Megatron's local layers: packed rows (thd) and plain batches (sbhd).

    On CUDA with half precision a packed row is one call of torch's varlen flash attention; otherwise its
    blocks are padded and go through `scaled_dot_product_attention`. Under context parallelism a rank has the
    queries of its slice and gathers the keys and values of all. Values may have a width of their own.
    """

    takes_varlen = True

    def __init__(  # noqa: PLR0917 (Megatron's signature)
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert config.kv_channels is not None
        self._context = None if pg_collection is None else pg_collection.cp
        self._sliced = self._context is not None and self._context.size() > 1
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
        """Packed: query [t, heads, d], key [t, groups, d], value [t, groups, v] of this rank's slice -> [t, heads * v].

        Plain: query [s, b, heads, d], key [s, b, groups, d], value [s, b, groups, v] -> [s, b, heads * v].
        """
        if packed_seq_params is None:
            if self._sliced:
                raise ValueError("a plain batch is not cut over context-parallel ranks; a packed row is needed")
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        key, value = self._of_all_slices(key, value)
        if self.takes_varlen and is_varlen(query.device, query.dtype):
            return self._varlen(query, key, value, packed_seq_params)
        if packed_seq_params.blocks is None:
            raise ValueError(
                f"{query.dtype} on {query.device} has no varlen attention, for which the row was described"
            )
        return self._blockwise(query, key, value, packed_seq_params.blocks)

    def _of_all_slices(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, groups, d] of the context-parallel ranks, one slice after the other, with gradient."""
        if not self._sliced:
            return key, value
        both = gather_from_sequence_parallel_region(torch.cat([key, value], -1).contiguous(), group=self._context)
        gathered_key, gathered_value = both.split([key.size(-1), value.size(-1)], -1)
        return gathered_key, gathered_value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [b, heads, s, d], key [b, groups, u, d], value [b, groups, u, v] -> [b, heads, s, v].

        mask: bool [b, 1, s, u], what is seen; None: causal.
        """
        dtype = query.dtype
        if query.device.type == "cpu":
            # torch's bfloat16 kernel for CPUs takes five times as long in the backward pass of short segments.
            query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        wide = _as_wide(value, query)
        output = scaled_dot_product_attention(
            query, key, wide, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output[..., : value.size(-1)].to(dtype)

    def _blockwise(self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        output = query.new_zeros(*query.shape[:2], value.size(-1))
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
        from torch.nn.attention.varlen import varlen_attn  # it loads torch's compiler: seconds of a start on CPUs

        output = varlen_attn(
            query,
            key,
            _as_wide(value, query),
            packed.query_ends,
            packed.key_ends,
            *packed.longest,
            scale=self.scale,
            window_size=(-1, 0),  # causal, counted from the ends of segment and keys
        )
        assert isinstance(output, Tensor)
        return output[..., : value.size(-1)].flatten(1)


def _as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Values with zeros up to the width of the queries: the kernels that keep no scores have one width."""
    missing = query.size(-1) - value.size(-1)
    return pad(value, (0, missing)) if missing > 0 else value


def _padded(packed: Tensor, tokens: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """Tokens of [T, heads, d] as [count, heads, length, d], zeros in the pads."""
    rows = packed.new_zeros(shape[0] * shape[1], *packed.shape[1:])
    rows = rows.index_copy(0, slots, packed.index_select(0, tokens))
    return rows.view(*shape, *packed.shape[1:]).transpose(1, 2)
