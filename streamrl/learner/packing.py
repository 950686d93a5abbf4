"""From the samples of a step to packed micro batches, in numpy: which sample goes where, and the arrays.

    samples ──plan──▶ data-parallel ranks x K bins under a token budget ──pack──▶ one packed row a bin

A row holds each sample's prompt and output up to the token before the last trained one: nothing behind
it is read, because the log-prob of output token t is read at the position before t.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.types import Batch, Sample


class SequenceTooLongError(ValueError):
    """A sequence does not fit into one micro batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """One packed row of T tokens with N trained output tokens of S samples.

    Example: prompt [5, 6] with output [7, 2] at version 3, trained at step 4, makes `ids=[5, 6, 7],
    positions=[0, 1, 2], cu_seqlens=[0, 3], targets=[1, 2], tokens=[7, 2], staleness=[1, 1]`.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], counted within each sequence
    cu_seqlens: np.ndarray  # int32 [B + 1], where each sequence begins, and T
    targets: np.ndarray  # int64 [N], places in the row whose hidden state predicts a trained token
    tokens: np.ndarray  # int64 [N], the trained tokens
    behaviour: np.ndarray  # float32 [N], log-probs under the behaviour policy
    advantages: np.ndarray  # float32 [N]
    staleness: np.ndarray  # int64 [N], learner steps
    sample: np.ndarray  # int64 [N], 0..samples-1
    samples: int


def packed_length(sample: Sample) -> int:
    """Tokens that a sample takes in a packed row: 0 when none of its tokens is trained."""
    trained = np.flatnonzero(sample.loss_mask)
    return len(sample.prompt_ids) + int(trained[-1]) if len(trained) else 0


def plan(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Which indices of `lengths` go into which micro batch of which rank: [ranks][K][...].

    Longest first into the emptiest of ranks x K bins; K is the smallest number with which no bin goes over
    `budget` tokens, and is the same on every rank. Indices of length 0 are left out; a bin may stay empty.
    Source: LPT scheduling (Graham 1969). Raises ValueError for a length over the budget.

    >>> plan([5, 3, 2, 0], ranks=1, budget=6)
    [[[0], [1, 2]]]
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > budget:
        raise ValueError(f"length {lengths[order[0]]} at index {order[0]} is over the budget of {budget} tokens")
    micro_batches = max(1, -(-sum(lengths) // (ranks * budget)))
    while (bins := _fill(order, lengths, ranks * micro_batches, budget)) is None:
        micro_batches += 1
    return [bins[rank::ranks] for rank in range(ranks)]


def _fill(order: Sequence[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """`count` bins, or None when the emptiest has no room for the next."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, index) for index in range(count)]
    for item in order:
        load, index = emptiest[0]
        if load + lengths[item] > budget:
            return None
        bins[index].append(item)
        heapq.heapreplace(emptiest, (load + lengths[item], index))
    return bins


def plan_batch(
    batch: Batch, advantages: Sequence[float], ranks: int, budget: int
) -> list[list[MicroBatch]]:
    """The micro batches of every data-parallel rank, as many on each: [ranks][K].

    advantages: one for each sample of the batch, in its order.
    Raises SequenceTooLongError and ValueError, naming group and sample.
    """
    samples = batch.samples
    lengths = [packed_length(sample) for sample in samples]
    for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        if length > budget:
            raise SequenceTooLongError(
                f"learner.tokens_per_micro_batch: {budget} tokens are too few for {_where(batch, index)} "
                f"of {length} tokens; allowed: at least {max(lengths)}"
            )
        if length and not len(sample.prompt_ids):
            raise ValueError(f"{_where(batch, index)} has an empty prompt: nothing predicts its first token")
    return [
        [pack(samples, advantages, chosen, batch.step) for chosen in bins] for bins in plan(lengths, ranks, budget)
    ]


def _where(batch: Batch, index: int) -> str:
    for group in batch.groups:
        if index < len(group.samples):
            return f"group {group.group_id} sample {index}"
        index -= len(group.samples)
    raise IndexError(index)


def pack(samples: Sequence[Sample], advantages: Sequence[float], chosen: Sequence[int], step: int) -> MicroBatch:
    """One packed row of the chosen samples. An empty choice makes a row of one token with no target, so that
    a rank without work still takes part in every collective."""
    if not chosen:
        return _idle()
    parts = [_place(samples[index], advantages[index], step) for index in chosen]
    lengths = np.array([len(part.ids) for part in parts])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return MicroBatch(
        ids=np.concatenate([part.ids for part in parts]).astype(np.int64),
        positions=np.arange(starts[-1]) - np.repeat(starts[:-1], lengths),
        cu_seqlens=starts.astype(np.int32),
        targets=np.concatenate([part.targets + start for part, start in zip(parts, starts[:-1], strict=True)]),
        tokens=np.concatenate([part.tokens for part in parts]).astype(np.int64),
        behaviour=np.concatenate([part.behaviour for part in parts]),
        advantages=np.concatenate([np.full(len(part.tokens), part.advantage, np.float32) for part in parts]),
        staleness=np.concatenate([part.staleness for part in parts]).astype(np.int64),
        sample=np.repeat(np.arange(len(parts)), [len(part.tokens) for part in parts]),
        samples=len(parts),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """One sample, its targets counted from its own first token."""

    ids: np.ndarray
    targets: np.ndarray
    tokens: np.ndarray
    behaviour: np.ndarray
    staleness: np.ndarray
    advantage: float


def _place(sample: Sample, advantage: float, step: int) -> _Placed:
    trained = np.flatnonzero(sample.loss_mask)
    ids = np.concatenate([sample.prompt_ids, sample.output_ids])
    return _Placed(
        ids=ids[: packed_length(sample)],
        targets=len(sample.prompt_ids) + trained - 1,
        tokens=sample.output_ids[trained],
        behaviour=sample.logprobs[trained],
        staleness=step - sample.token_steps()[trained],
        advantage=advantage,
    )


def _idle() -> MicroBatch:
    nothing = np.zeros(0, np.int64)
    return MicroBatch(
        ids=np.zeros(1, np.int64),
        positions=np.zeros(1, np.int64),
        cu_seqlens=np.array([0, 1], np.int32),
        targets=nothing,
        tokens=nothing,
        behaviour=nothing.astype(np.float32),
        advantages=nothing.astype(np.float32),
        staleness=nothing,
        sample=nothing,
        samples=0,
    )
