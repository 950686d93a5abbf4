"""Everything that the model of a run is made of: seconds of each part, and answers as they were recorded."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.lab.simulate.server import ServerSpeed

# Recorded groups, nearest in their policy's step, among which one is drawn: as the policy learns, its lengths change.
NEIGHBOURS = 256


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One group of a run, as far as the model needs it."""

    step: int  # of the policy that began it
    lengths: tuple[int, ...]  # tokens of each rollout
    rewards: tuple[float, ...]
    passed: tuple[bool, ...]
    trained: tuple[int, ...] = ()  # tokens of each rollout that enter the loss: no tool's; (): all

    def trained_of(self, place: int, longest: int) -> int:
        """Tokens of a rollout that enter the loss, where it is cut at `longest`: in proportion."""
        length = self.lengths[place]
        return round((self.trained or self.lengths)[place] * min(longest, length) / max(1, length))


@dataclass(frozen=True, slots=True)
class Answers:
    """What the next group is like: recorded groups drawn again, whole, from those of about the same policy.

    A group that is drawn whole keeps what its answers have in common: a hard prompt's are all long.
    """

    groups: tuple[RecordedGroup, ...]  # ascending steps
    neighbours: int = NEIGHBOURS

    @property
    def last(self) -> Answers:
        """The last third of the groups, NEIGHBOURS at least: one is drawn from all of them, whatever the step."""
        count = max(NEIGHBOURS, math.ceil(len(self.groups) / 3))
        return Answers(self.groups[-count:], neighbours=count)

    def draw(self, rng: random.Random, step: int, size: int, longest: int) -> RecordedGroup:
        """`size` samples of at most `longest` tokens, for a policy of `step`."""
        centre = bisect_left(self.groups, step, key=lambda group: group.step)
        first = max(0, min(centre - self.neighbours // 2, len(self.groups) - self.neighbours))
        group = self.groups[rng.randrange(first, min(first + self.neighbours, len(self.groups)))]
        places = list(range(len(group.lengths)))
        chosen = rng.sample(places, size) if size <= len(places) else rng.choices(places, k=size)
        return RecordedGroup(
            step=group.step,
            lengths=tuple(min(longest, group.lengths[place]) for place in chosen),
            rewards=tuple(group.rewards[place] for place in chosen),
            passed=tuple(group.passed[place] for place in chosen),
            trained=tuple(group.trained_of(place, longest) for place in chosen),
        )


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds = fixed + each x amount, times one of the recorded deviations."""

    fixed: float
    each: float
    deviations: tuple[float, ...] = (1.0,)  # measured over fitted, of each record: their mean is 1

    def draw(self, rng: random.Random, amount: float) -> float:
        """Seconds for this amount."""
        return (self.fixed + self.each * amount) * rng.choice(self.deviations)


@dataclass(frozen=True, slots=True)
class Model:
    """A run's parts. Times in seconds."""

    answers: Answers
    server: ServerSpeed
    learner: Line  # a step against its trained tokens, without its waits and publishes
    update: Line  # a server's update against the samples that it has
    copy: float = 0.0  # the learner waits while its weights are copied for the publisher
    announce: float = 0.0  # from there to the first server
    transfer: float = 0.0  # a publish to one server, without the server's update
    at_once: int | None = None  # servers that are published to at the same time; None: `publish.at_once`
    hand_out: float = 0.0  # from news of a version to the first request
    delivery: float = 0.0  # from a complete batch to the learner
    save: float = 0.0  # a checkpoint
    longest: int | None = None  # `max_new_tokens` of the answers, which a larger one does not cut again; None: unknown
    ess_decay: float = 0.0  # effective sample size = exp(-ess_decay x mean staleness)
    clipped_growth: float = 0.0  # share of clipped tokens a step of mean staleness
    masked_growth: float = 0.0  # the same of masked ones

    def signals(self, age: float) -> dict[str, float]:
        """What the learner reports of a step whose tokens are `age` steps old in the mean, by the metrics' names."""
        return {
            "staleness/mean": age,
            "offpolicy/ess": math.exp(-self.ess_decay * age),
            "offpolicy/clipped": min(1.0, self.clipped_growth * age),
            "offpolicy/masked": min(1.0, self.masked_growth * age),
        }


def deviations(measured: Sequence[float], fitted: Sequence[float]) -> tuple[float, ...]:
    """Measured over fitted, scaled to the mean 1; `(1.0,)` without any."""
    ratios = [value / line for value, line in zip(measured, fitted, strict=True) if line > 0]
    mean = sum(ratios) / len(ratios) if ratios else 0.0
    return tuple(ratio / mean for ratio in ratios) if mean > 0 else (1.0,)
