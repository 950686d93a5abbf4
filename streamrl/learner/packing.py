"""From the samples of a step to packed micro batches, in numpy: which sample goes where, and the arrays.

    samples ──bundle──▶ samples that share a prompt ──plan──▶ ranks x K bins under a token budget ──pack──▶ rows

The answers of a group share their prompt, so a row holds it once, and each answer behind it up to the
token before its last trained one: nothing later is read, because the log-prob of output token t is read
at the token before t. Prompt and answers are the row's segments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.learner.batch_metrics import token_ages
from streamrl.types import Batch, Sample


class SequenceTooLongError(ValueError):
    """A sequence does not fit into one micro batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """One packed row of T tokens with N trained output tokens of S samples.

    A segment is (start, length, prefix start, prefix length): its tokens see its whole prefix, which is a
    segment of its own, and each other causally. Example: prompt [5, 6] with outputs [7, 8, 2] and [9, 2] makes
    `ids=[5, 6, 7, 8, 9], positions=[0, 1, 2, 3, 2], segments=[[0, 2, 0, 0], [2, 2, 0, 2], [4, 1, 0, 2]],
    targets=[1, 2, 3, 1, 4], tokens=[7, 8, 2, 9, 2], sample=[0, 0, 0, 1, 1]`.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], of the token in its own prompt and answer
    segments: np.ndarray  # int64 [B, 4], in the order of the row, without gaps
    targets: np.ndarray  # int64 [N], places in the row whose hidden state predicts a trained token
    tokens: np.ndarray  # int64 [N], the trained tokens
    behaviour: np.ndarray  # float32 [N], log-probs under the behaviour policy
    advantages: np.ndarray  # float32 [N]
    staleness: np.ndarray  # int64 [N], learner steps
    sample: np.ndarray  # int64 [N], 0..samples-1
    samples: int


def plan_batch(
    batch: Batch, advantages: Sequence[float], ranks: int, budget: int, share_prompts: bool
) -> list[list[MicroBatch]]:
    """The micro batches of every data-parallel rank, as many on each: [ranks][K].

    advantages: one for each sample of the batch, in its order; budget: tokens of a row; share_prompts: False
    repeats the prompt for every answer, which makes one segment of both. Samples without a trained token
    are left out. Raises SequenceTooLongError and ValueError, naming group and sample.
    """
    _check(batch, budget)
    samples = batch.samples
    bundles = list(_bundles(samples, budget if share_prompts else 0))

    def row(chosen: Sequence[int]) -> MicroBatch:
        return pack(samples, advantages, [bundles[index][0] for index in chosen], batch.step, share_prompts)

    planned = plan([length for _, length in bundles], ranks, budget)
    return [[row(chosen) for chosen in bins] for bins in planned]


def plan(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Which indices of `lengths` go into which micro batch of which rank: [ranks][K][...].

    Longest first into the emptiest of ranks x K bins; K is the smallest number with which no bin goes over
    `budget` tokens, and is the same on every rank. A bin may stay empty.
    Source: LPT scheduling (Graham 1969). Raises ValueError for a length over the budget.

    >>> plan([5, 3, 2], ranks=1, budget=6)
    [[[0], [1, 2]]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
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


def _check(batch: Batch, budget: int) -> None:
    for group in batch.groups:
        for index, sample in enumerate(group.samples):
            if not sample.loss_mask.any():
                continue
            where = f"group {group.group_id} sample {index}"
            length = len(sample.prompt_ids) + _answer_length(sample)
            if not len(sample.prompt_ids):
                raise ValueError(f"{where} has an empty prompt: nothing predicts its first token")
            if length > budget:
                raise SequenceTooLongError(
                    f"learner.tokens_per_micro_batch: {budget} tokens are too few for {where} of {length} tokens"
                )
            newest = sample.token_steps().max(initial=0)
            if newest > batch.step:
                raise ValueError(f"{where} was generated by step {newest}, the batch is of step {batch.step}")


def _answer_length(sample: Sample) -> int:
    """Output tokens that must be read: those before the last trained one."""
    trained = np.flatnonzero(sample.loss_mask)
    return int(trained[-1]) if len(trained) else 0


def _bundles(samples: Sequence[Sample], budget: int) -> Iterator[tuple[list[int], int]]:
    """Neighbours with the same prompt, as many as the budget has room for, one at least; and their tokens."""
    bundle: list[int] = []
    length = 0
    for index, sample in enumerate(samples):
        if not sample.loss_mask.any():
            continue
        answer = _answer_length(sample)
        fits = length + answer <= budget
        if bundle and not (fits and np.array_equal(samples[bundle[0]].prompt_ids, sample.prompt_ids)):
            yield bundle, length
            bundle = []
        length = answer + (length if bundle else len(sample.prompt_ids))
        bundle.append(index)
    if bundle:
        yield bundle, length


def pack(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    bundles: Sequence[Sequence[int]],
    step: int,
    share_prompts: bool = True,
) -> MicroBatch:
    """One packed row of the samples of some bundles. No bundle makes a row of one token without a target, so
    that a rank without work still takes part in every collective."""
    row = _Row(step)
    for bundle in bundles:
        if share_prompts:
            row.add_bundle([samples[index] for index in bundle], [advantages[index] for index in bundle])
        else:
            row.add_whole(samples[bundle[0]], advantages[bundle[0]])
    return row.finish()


class _Row:
    """A packed row while it grows."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._end = 0
        self._samples = 0
        self._ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._segments: list[tuple[int, int, int, int]] = []
        self._trained: dict[str, list[np.ndarray]] = {
            name: [] for name in ("targets", "tokens", "behaviour", "advantages", "staleness", "sample")
        }

    def add_bundle(self, samples: Sequence[Sample], advantages: Sequence[float]) -> None:
        """The prompt of the samples once, then each answer."""
        prompt = samples[0].prompt_ids
        start = self._append(prompt, 0, (0, 0))
        for sample, advantage in zip(samples, advantages, strict=True):
            answer = sample.output_ids[: _answer_length(sample)]
            places = np.concatenate([[start + len(prompt) - 1], self._end + np.arange(len(answer))])
            if len(answer):
                self._append(answer, len(prompt), (start, len(prompt)))
            self._add_targets(sample, advantage, places)

    def add_whole(self, sample: Sample, advantage: float) -> None:
        """Prompt and answer as one segment."""
        ids = np.concatenate([sample.prompt_ids, sample.output_ids[: _answer_length(sample)]])
        start = self._append(ids, 0, (0, 0))
        self._add_targets(sample, advantage, np.arange(start + len(sample.prompt_ids) - 1, self._end))

    def finish(self) -> MicroBatch:
        if not self._segments:
            self._append(np.zeros(1, np.int64), 0, (0, 0))

        def joined(arrays: list[np.ndarray], dtype: type = np.int64) -> np.ndarray:
            return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

        return MicroBatch(
            ids=joined(self._ids),
            positions=joined(self._positions),
            segments=np.array(self._segments, np.int64),
            targets=joined(self._trained["targets"]),
            tokens=joined(self._trained["tokens"]),
            behaviour=joined(self._trained["behaviour"], np.float32),
            advantages=joined(self._trained["advantages"], np.float32),
            staleness=joined(self._trained["staleness"]),
            sample=joined(self._trained["sample"]),
            samples=self._samples,
        )

    def _append(self, ids: np.ndarray, first_position: int, prefix: tuple[int, int]) -> int:
        """Put a segment at the end of the row; returns where it starts."""
        start = self._end
        self._ids.append(ids)
        self._positions.append(np.arange(first_position, first_position + len(ids)))
        self._segments.append((start, len(ids), *prefix))
        self._end += len(ids)
        return start

    def _add_targets(self, sample: Sample, advantage: float, places: np.ndarray) -> None:
        """places: where in the row the log-prob of output token 0, 1, ... is read."""
        trained = np.flatnonzero(sample.loss_mask)
        values = {
            "targets": places[trained],
            "tokens": sample.output_ids[trained],
            "behaviour": sample.logprobs[trained],
            "advantages": np.full(len(trained), advantage, np.float32),
            "staleness": token_ages(sample, self._step)[trained],
            "sample": np.full(len(trained), self._samples),
        }
        for name, array in values.items():
            self._trained[name].append(array)
        self._samples += 1
