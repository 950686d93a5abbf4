"""The learner's half of `publish.mismatch`: a few answers, scored with each published version and with the one before.

    first batch since a version ──choose──▶ answers ──score──▶ former ──steps──▶ score ──▶ Publish ──▶ prefill

A server with the very weights differs from the learner by how it computes alone, however stale the trained tokens
are. One that still has the version before is nearer to the former scores. All scores are at temperature 1 over the
whole vocabulary, as a prefill gives them; answers to prompts with images, which a server would need too, are left out.
"""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.config import Config
from streamrl.learner.trainer import Trainer
from streamrl.stream.messages import ScoredAnswer
from streamrl.trainable import answer_length
from streamrl.types import Batch, Group, Sample

COMMAND = "score"  # to the other ranks


class MismatchAnswers:
    """Scores answers with one published version and with the next.

    Usage:
        answers.begin(batch)  # the learner's weights are published
        trainer.train_step(batch)
        answers.finish()  # (ScoredAnswer(...), ...), to be published with the weights of now
    """

    def __init__(self, trainer: Trainer, answers: int, budget: int) -> None:
        """So many `answers` at most, whose sequences have `budget` tokens together at most."""
        self._trainer = trainer
        self._answers = answers
        self._budget = budget
        self._chosen: Batch | None = None
        self._former: list[float] = []

    @classmethod
    def of(cls, config: Config, trainer: Trainer) -> MismatchAnswers | None:
        """None where no mismatch is measured."""
        answers, budget = config.publish.mismatch, config.learner.tokens_per_micro_batch
        return cls(trainer, answers, budget) if answers else None

    def begin(self, batch: Batch) -> None:
        """The weights of now are published, and this is the first batch since."""
        self._chosen = choose(batch, self._answers, self._budget)
        if self._chosen is not None:
            self._former = self._scores(self._chosen)

    def finish(self) -> tuple[ScoredAnswer, ...]:
        """The answers with both scores; none where no batch was begun since the last call, or it had no answer."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return ()
        scores, start = self._scores(chosen), 0
        made: list[ScoredAnswer] = []
        for sample in chosen.samples:
            trained = sample.loss_mask.nonzero()[0].tolist()
            own = slice(start, start + len(trained))
            start = own.stop
            made.append(
                ScoredAnswer(
                    ids=[*sample.prompt_ids.tolist(), *sample.output_ids.tolist()],
                    prompt=len(sample.prompt_ids),
                    trained=trained,
                    logprobs=scores[own],
                    former=self._former[own],
                )
            )
        return tuple(made)

    def _scores(self, batch: Batch) -> list[float]:
        self._trainer.broadcast(COMMAND)
        scores: list[float] = self._trainer.score(batch).tolist()
        return scores


def choose(batch: Batch, answers: int, budget: int) -> Batch | None:
    """`answers` samples of a batch, evenly spread, each in a group of its own; None where it has none.

    The first of them always, the others while all sequences have `budget` tokens together at most.
    """
    able = [
        (group, sample)
        for group in batch.groups
        for sample in group.samples
        if not group.images and len(sample.prompt_ids) and answer_length(sample) is not None
    ]
    count, tokens = min(answers, len(able)), 0
    chosen: list[Group] = []
    for group, sample in (able[place * len(able) // count] for place in range(count)):
        tokens += _length(sample)
        if chosen and tokens > budget:
            break
        plain = replace(sample, extras={})  # neither temperatures, nor kept sets, nor the generator's experts
        chosen.append(replace(group, samples=(plain,), branches=(), arena=None, temperature=1.0))
    return replace(batch, groups=tuple(chosen)) if chosen else None


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.output_ids)
