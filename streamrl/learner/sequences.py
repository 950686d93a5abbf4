"""The sequences of a packed row, for layers that carry a state from token to token.

    prompts and whole sequences, in blocks of about one length ──state behind the last token──▶ answers, in blocks

An answer begins with the state that its prompt ends with, so that a shared prompt goes through a layer once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.learner.attention import PackedSegments, block_segments


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBlock:
    """Sequences that go through a layer together, padded behind their ends.

    Example: answers of 2 and 1 tokens behind the row's only prompt have `tokens` [2, 2] and `parents` [0, 0].
    """

    tokens: Tensor  # int64 [n, t], places in the row; of pads 0
    real: Tensor  # bool [n, t]
    parents: Tensor | None  # int64 [n], number of each one's prompt among all without a prompt; None: they have none


def sequences_of(row: PackedSegments, device: torch.device) -> tuple[SequenceBlock, ...]:
    """The sequences of a row that `describe_row` has described, made once for all layers."""
    if row.sequences is None:
        assert row.segments is not None, "a row that `describe_row` has not described"
        row.sequences = sequence_blocks(block_segments(row.segments), device)
    sequences: tuple[SequenceBlock, ...] = row.sequences
    return sequences


def sequence_blocks(blocks: Sequence[np.ndarray], device: torch.device) -> tuple[SequenceBlock, ...]:
    """The sequences in blocks of segments, int64 [n, 5] each (`attention.block_segments`), those without prefix first.

    A prefix is a whole segment without a prefix of its own.
    """
    number: dict[int, int] = {}  # of a sequence without a prompt, by its first place
    made = []
    for block in blocks:
        starts, lengths, prefix_starts, prefixes, _ = block.T
        places = np.arange(int(lengths.max()))
        real = places < lengths[:, None]
        parents = None
        if prefixes.any():
            parents = torch.tensor([number[start] for start in prefix_starts.tolist()], device=device)
        else:
            number |= {start: len(number) + index for index, start in enumerate(starts.tolist())}
        tokens = np.where(real, starts[:, None] + places, 0)
        made.append(SequenceBlock(torch.from_numpy(tokens).to(device), torch.from_numpy(real).to(device), parents))
    return tuple(made)
