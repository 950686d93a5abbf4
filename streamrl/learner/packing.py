"""From the samples of a step to packed micro batches, in numpy: which sample goes where, and the arrays.

    samples ──bundle──▶ samples that share a prompt ──plan──▶ ranks x K bins under a token budget ──pack──▶ rows

The answers of a group share their prompt, so a row holds it once, and each answer behind it up to the
token before its last trained one: nothing later is read, because the log-prob of output token t is read
at the token before t. Prompt and answers are the row's segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from streamrl.config.file import ConfigError
from streamrl.learner.batch_metrics import token_ages
from streamrl.learner.bins import plan
from streamrl.moe_routing import OUTPUT, UNKNOWN, Alike, routed_alike, unfold
from streamrl.sampling_columns import KeptSets, kept_sets, temperatures
from streamrl.trainable import answer_length
from streamrl.types import Batch, Group, Sample


class SequenceTooLongError(ConfigError):
    """A sequence does not fit into one micro batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """One packed row of T tokens with N trained output tokens of S samples.

    A segment is (start, length, prefix start, prefix length): its tokens see its whole prefix, which is a
    segment of its own, and each other causally. Example: prompt [5, 6] with outputs [7, 8, 2] and [9, 2] makes
    `ids=[5, 6, 7, 8, 9], positions=[0, 1, 2, 3, 2], segments=[[0, 2, 0, 0], [2, 2, 0, 2], [4, 1, 0, 2]],
    targets=[1, 2, 3, 1, 4], tokens=[7, 8, 2, 9, 2], sample=[0, 0, 0, 1, 1], place=[0, 1, 2, 3, 4]`.
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
    place: np.ndarray  # int64 [N], number of the token among all trained ones of the step, in the batch's order
    temperature: np.ndarray  # float64 [N], at which the token was drawn
    samples: int
    groups: tuple[tuple[int, int], ...] = ()  # (id, attempt) of those that it has samples of
    routed_experts: np.ndarray | None = None  # int16 [T, layers, top_k] of the generator, -1 where unknown
    images: tuple[tuple[int, tuple[bytes, ...]], ...] = ()  # (segment, encoded files) of those with images
    kept: KeptSets | None = None  # of the N trained tokens; None: all were drawn from the whole vocabulary
    rollout_tokens: np.ndarray | None = None  # int64 [N], as `TokenBatch`; None: it has no branches


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How rows are made.

    Example: `Packing(ranks=2, budget=4096, share_prompts=True)`.
    """

    ranks: int  # data-parallel ones
    budget: int  # tokens of a row
    share_prompts: bool  # False repeats the prompt for every answer, which makes one segment of both
    whole_answers: bool = False  # with their last tokens, which nothing is read behind, where the budget has room
    # No two groups share a row: for a rehearsal. Without shared prompts no two sequences: for models with a state.
    apart: bool = False
    sequence_multiple: int = 1  # of tokens that a sequence takes in a row, pads included: `learner/rows.py`
    multiple: int = 1  # the rows of a rank are a multiple of it: pipelines with virtual stages need their size
    routing: tuple[int, int] | None = None  # (layers, top_k) of `routed_experts`; None: the learner's router decides
    image_token: int | None = None  # the one that images replace; None: the model reads none


def plan_step(
    batch: Batch, advantages: Sequence[float], packing: Packing, mini_batches: int = 1
) -> list[list[list[MicroBatch]]]:
    """The micro batches of every update of a step, for every data-parallel rank: [mini batches][ranks][K].

    K is the same on every rank of one mini batch. Otherwise as `plan_batch`.
    """
    planned, sample, place = [], 0, 0
    for part in cut(batch, mini_batches):
        of_part = advantages[sample : sample + len(part.samples)]
        planned.append(plan_batch(part, of_part, packing, place))
        sample += len(part.samples)
        place += sum(group.trained_tokens for group in part.groups)
    return planned


def cut(batch: Batch, parts: int) -> list[Batch]:
    """The groups of a batch in order, in `parts` mini batches of as many groups, give or take one.

    Raises ConfigError for more parts than groups.
    """
    count = len(batch.groups)
    if parts > count:
        raise ConfigError(
            f"learner.mini_batches: {parts} cannot share the {count} groups of a step; allowed: 1..{count}"
        )
    edges = [part * count // parts for part in range(parts + 1)]
    return [msgspec.structs.replace(batch, groups=batch.groups[start:end]) for start, end in itertools.pairwise(edges)]


def plan_batch(
    batch: Batch, advantages: Sequence[float], packing: Packing, first_place: int = 0
) -> list[list[MicroBatch]]:
    """The micro batches of every data-parallel rank, as many on each: [ranks][K].

    advantages: one for each sample of the batch, in its order; first_place: `place` of the batch's first trained
    token. Samples without a trained token are left out. Raises SequenceTooLongError and ValueError, naming
    group and sample.
    """
    _check(batch, packing)
    answers = _answers(batch, advantages, packing, first_place)
    bundles = list(_bundles(answers, packing.budget if packing.share_prompts else 0, apart=packing.apart))
    lengths = [_padded(length, packing) for _, length in bundles]
    planned = plan(lengths, packing.ranks, packing.budget, packing.multiple)
    return [[pack([bundles[index][0] for index in chosen], batch.step, packing) for chosen in bins] for bins in planned]


def _padded(length: int, packing: Packing) -> int:
    """The tokens that a bundle counts for; of one that just fits, the pads may go over the budget."""
    if packing.apart:
        return packing.budget  # a full row takes nothing else
    each = packing.sequence_multiple
    return min(-(-length // each) * each, packing.budget)


def _check(batch: Batch, packing: Packing) -> None:
    budget = packing.budget
    for group in batch.groups:
        if group.images and packing.image_token is None:
            raise ValueError(f"group {group.group_id} has images, which the model does not read")
        for index, sample in enumerate(group.samples):
            if (answer := answer_length(sample)) is None:
                continue
            where = f"group {group.group_id} sample {index}"
            length = len(sample.prompt_ids) + answer
            if not len(sample.prompt_ids):
                raise ValueError(f"{where} has an empty prompt: nothing predicts its first token")
            if packing.image_token is not None and not group.images and packing.image_token in sample.prompt_ids:
                raise ValueError(f"{where} has image tokens in its prompt and no images")
            if length > budget:
                raise SequenceTooLongError(
                    f"learner.tokens_per_micro_batch: {budget} tokens are too few for {where} of {length} tokens"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """A sample with a trained token, and what its batch says of it."""

    sample: Sample
    group: tuple[int, int]  # id, attempt
    temperature: float
    advantage: float
    first_place: int  # of its first trained token
    length: int  # output tokens that its segment has
    prompt_experts: np.ndarray | None  # int [P, layers * top_k]
    images: tuple[bytes, ...]  # of the prompt
    rollout_tokens: int  # trained ones of all branches of its rollout
    has_branches: bool  # some rollout of its group has several samples


def _answers(batch: Batch, advantages: Sequence[float], packing: Packing, place: int) -> list[_Answer]:
    answers = []
    given = iter(advantages)
    for group in batch.groups:
        experts = _prompt_experts(group) if packing.routing else {}
        of_group = []
        counts = [int(np.count_nonzero(sample.loss_mask)) for sample in group.samples]
        of_rollouts = np.bincount(group.rollout_of, counts)[group.rollout_of].astype(int).tolist()
        for sample, trained, together in zip(group.samples, counts, of_rollouts, strict=True):
            advantage = next(given)
            if trained:
                prompt_experts = experts.get(routed_alike(sample))
                of_group.append(
                    _Answer(
                        sample=sample,
                        group=(group.group_id, group.attempt),
                        temperature=group.temperature,
                        advantage=advantage,
                        first_place=place,
                        length=_read_length(sample, packing),
                        prompt_experts=prompt_experts,
                        images=group.images,
                        rollout_tokens=together,
                        has_branches=bool(group.branches),
                    )
                )
            place += trained
        answers += _by_prompt(of_group) if group.branches else of_group
    return answers


def _read_length(sample: Sample, packing: Packing) -> int:
    """Output tokens that its segment has."""
    if packing.whole_answers and len(sample.prompt_ids) + len(sample.output_ids) <= packing.budget:
        return len(sample.output_ids)
    return answer_length(sample) or 0


def _by_prompt(answers: Sequence[_Answer]) -> list[_Answer]:
    """Those with the same prompt next to one another: branches of a rollout are between others of their prompt."""
    found: dict[bytes, list[_Answer]] = {}
    for answer in answers:
        found.setdefault(answer.sample.prompt_ids.tobytes(), []).append(answer)
    return [answer for alike in found.values() for answer in alike]


def _prompt_experts(group: Group) -> dict[Alike, np.ndarray]:
    """The experts of each prompt. One of the samples routed alike has them, a row for each of its output tokens."""
    found = {}
    for sample in group.samples:
        experts = unfold(sample)
        if experts is not None:
            found[routed_alike(sample)] = experts
    return found


def _bundles(answers: Sequence[_Answer], budget: int, *, apart: bool) -> Iterator[tuple[list[_Answer], int]]:
    """Neighbours with the same prompt, as many as the budget has room for, one at least; and their tokens.

    `apart`: of one group alone.
    """
    bundle: list[_Answer] = []
    length = 0
    for answer in answers:
        joins = bool(bundle) and not (apart and bundle[0].group != answer.group)
        if bundle and not (joins and length + answer.length <= budget and _share_a_prompt(bundle[0], answer)):
            yield bundle, length
            bundle = []
        length = answer.length + (length if bundle else len(answer.sample.prompt_ids))
        bundle.append(answer)
    if bundle:
        yield bundle, length


def _share_a_prompt(answer: _Answer, other: _Answer) -> bool:
    """The same tokens and images, routed to the same experts."""
    same = np.array_equal(answer.sample.prompt_ids, other.sample.prompt_ids) and answer.images == other.images
    return same and answer.prompt_experts is other.prompt_experts


def pack(bundles: Sequence[Sequence[_Answer]], step: int, packing: Packing) -> MicroBatch:
    """One packed row of the samples of some bundles. No bundle makes a row of one token without a target, so
    that a rank without work still takes part in every collective."""
    row = _Row(step, packing.routing)
    for bundle in bundles:
        if packing.share_prompts:
            row.add_bundle(bundle)
        else:
            row.add_whole(bundle[0])
    return row.finish()


# Fields of a micro batch that have an entry for each trained token.
TOKEN_FIELDS = ("targets", "tokens", "behaviour", "advantages", "staleness", "sample", "place", "temperature")


class _Row:
    """A packed row while it grows."""

    def __init__(self, step: int, routing: tuple[int, int] | None) -> None:
        self._step = step
        self._routing = routing
        self._end = 0
        self._samples = 0
        self._groups: dict[tuple[int, int], None] = {}
        self._ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._segments: list[tuple[int, int, int, int]] = []
        self._experts: list[np.ndarray] = []
        self._kept: list[KeptSets] = []
        self._images: list[tuple[int, tuple[bytes, ...]]] = []
        self._rollout_tokens: list[np.ndarray] = []
        self._has_branches = False
        self._trained: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_FIELDS}

    def add_bundle(self, bundle: Sequence[_Answer]) -> None:
        """The prompt of the samples once, then each answer."""
        prompt = bundle[0].sample.prompt_ids
        self._add_images(bundle[0])
        start = self._append(prompt, 0, (0, 0))
        self._append_experts(len(prompt), bundle[0].prompt_experts)
        for answer in bundle:
            places = np.concatenate([[start + len(prompt) - 1], self._end + np.arange(answer.length)])
            if answer.length:
                self._append(answer.sample.output_ids[: answer.length], len(prompt), (start, len(prompt)))
                self._append_experts(answer.length, answer.sample.extras.get(OUTPUT))
            self._add_targets(answer, places)

    def add_whole(self, answer: _Answer) -> None:
        """Prompt and answer as one segment."""
        sample = answer.sample
        ids = np.concatenate([sample.prompt_ids, sample.output_ids[: answer.length]])
        self._add_images(answer)
        start = self._append(ids, 0, (0, 0))
        self._append_experts(len(sample.prompt_ids), answer.prompt_experts)
        self._append_experts(answer.length, sample.extras.get(OUTPUT))
        self._add_targets(answer, np.arange(start + len(sample.prompt_ids) - 1, self._end))

    def finish(self) -> MicroBatch:
        if not self._segments:
            self._append(np.zeros(1, np.int64), 0, (0, 0))
            self._append_experts(1, None)

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
            place=joined(self._trained["place"]),
            temperature=joined(self._trained["temperature"], np.float64),
            samples=self._samples,
            groups=tuple(self._groups),
            routed_experts=np.concatenate(self._experts) if self._routing else None,
            images=tuple(self._images),
            kept=KeptSets.joined(self._kept) if any(len(sets.ids) for sets in self._kept) else None,
            rollout_tokens=joined(self._rollout_tokens) if self._has_branches else None,
        )

    def _append(self, ids: np.ndarray, first_position: int, prefix: tuple[int, int]) -> int:
        """Put a segment at the end of the row; returns where it starts."""
        start = self._end
        self._ids.append(ids)
        self._positions.append(np.arange(first_position, first_position + len(ids)))
        self._segments.append((start, len(ids), *prefix))
        self._end += len(ids)
        return start

    def _add_images(self, answer: _Answer) -> None:
        """Those of the segment that comes next."""
        if answer.images:
            self._images.append((len(self._segments), answer.images))

    def _append_experts(self, length: int, experts: np.ndarray | None) -> None:
        """The experts of the next `length` tokens: the first of `experts` [>= length, layers * top_k], or unknown."""
        if self._routing is None:
            return
        if experts is None:
            self._experts.append(np.full((length, *self._routing), UNKNOWN, np.int16))
        else:
            self._experts.append(experts[:length].reshape(length, *self._routing).astype(np.int16))

    def _add_targets(self, answer: _Answer, places: np.ndarray) -> None:
        """places: where in the row the log-prob of output token 0, 1, ... is read."""
        sample = answer.sample
        trained = np.flatnonzero(sample.loss_mask)
        values = {
            "targets": places[trained],
            "tokens": sample.output_ids[trained],
            "behaviour": sample.logprobs[trained],
            "advantages": np.full(len(trained), answer.advantage, np.float32),
            "staleness": token_ages(sample, self._step)[trained],
            "sample": np.full(len(trained), self._samples),
            "place": answer.first_place + np.arange(len(trained)),
            "temperature": temperatures(sample, answer.temperature)[trained],
        }
        sets = kept_sets(sample)
        self._kept.append(KeptSets.whole(len(trained)) if sets is None else sets.where(sample.loss_mask))
        for name, array in values.items():
            self._trained[name].append(array)
        self._rollout_tokens.append(np.full(len(trained), answer.rollout_tokens))
        self._has_branches |= answer.has_branches
        self._groups[answer.group] = None
        self._samples += 1
