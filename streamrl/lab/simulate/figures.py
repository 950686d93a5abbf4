"""What is predicted and what is measured, read from the same rows by the same code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from streamrl.config import Config
from streamrl.observe.metrics import incarnation
from streamrl.replay.release_gate import slow_start
from streamrl.types import Batch

# First steps that no figure counts: caches fill, and the pipeline of groups is still empty.
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run's steps after the warm-up."""

    trained: float  # tokens/s, over wall-clock time
    generated: float  # tokens/s
    idle_learner: float  # share of the time
    idle_generator: float
    staleness_mean: float  # learner steps, over trained tokens
    staleness_p95: float  # mean of the steps' 95th percentiles
    staleness_max: float

    @property
    def sustained(self) -> float:
        """Trained tokens/s of a run that goes on: what the begin has left in the buffer is used up in a short one."""
        return min(self.trained, self.generated)

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def edge(config: Config) -> int:
    """Learner steps from a group's begin to its training, at most."""
    return math.ceil(config.replay.bound)


def between(rows: Sequence[Mapping[str, Any]], config: Config) -> Sequence[Mapping[str, Any]]:
    """The steps of a run of `run.steps` steps but for those at its ends.

    The first steps train what was begun before any step, and in the last ones nothing more is begun: as many as the
    bound has count at neither end: with them a larger bound would look slower than it is. Nor do those before them
    count in which the release policy does not know its lead time yet: a run that goes on has few of their kind.
    """
    return rows[slow_start(config.replay) + edge(config) : config.run.steps - edge(config)]


def at_ends(config: Config) -> int:
    """Learner steps that `between` leaves out."""
    return slow_start(config.replay) + 2 * edge(config)


def figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """From rows of metrics.jsonl, or of a simulation. Raises ValueError for a run no longer than the warm-up.

    Of a run that was resumed, the step with which each learner began counts no more than the time it was down.
    """
    pairs = [pair for pair in pairwise(rows[WARM_UP - 1 :]) if not _starts(*pair)]
    counted = [row for _, row in pairs]
    if len(counted) < 2:
        raise ValueError(
            f"{len(rows)} steps, of which the first {WARM_UP}, and the first of each further start, are not counted: "
            "too few"
        )
    seconds = max(1e-9, sum(row["time"] - before["time"] for before, row in pairs))
    in_steps = max(1e-9, sum(row["time/step"] for row in counted))
    tokens = sum(row["tokens/trained"] for row in counted)
    aged = [row for row in counted if row["tokens/trained"]]  # the others have no staleness
    return Figures(
        trained=tokens / seconds,
        generated=sum(row["tokens/generated"] for row in counted) / seconds,
        idle_learner=sum(row["time/wait"] for row in counted) / seconds,
        idle_generator=sum(row["idle/generator"] * row["time/step"] for row in counted) / in_steps,
        staleness_mean=sum(row["staleness/mean"] * row["tokens/trained"] for row in aged) / max(1, tokens),
        staleness_p95=sum(row["staleness/p95"] for row in aged) / max(1, len(aged)),
        staleness_max=max((row["staleness/max"] for row in aged), default=0),
    )


def _starts(before: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Is the row the first of a learner that was started again? The time since the one before is not the run's."""
    return incarnation(before) != incarnation(row)


def mean(several: Sequence[Figures]) -> Figures:
    """The mean figures of runs that differ by chance alone; `staleness_max` is that of all of them."""
    means = Figures(*(fmean(getattr(each, field.name) for each in several) for field in fields(Figures)))
    return replace(means, staleness_max=max(each.staleness_max for each in several))


def staleness(batch: Batch) -> dict[str, float]:
    """`tokens/trained` and `staleness/` of a batch, as `learner/batch_metrics.py` counts them, from spans and masks.

    NaN where no token is trained.
    """
    tokens: Counter[int] = Counter()
    for sample in batch.samples:
        for span in sample.spans:
            if trained := int(np.count_nonzero(sample.loss_mask[span.start : span.end])):
                tokens[max(0, batch.step - span.version.step)] += trained
    total, below, p95 = tokens.total(), 0, math.nan
    for age in sorted(tokens):
        below += tokens[age]
        p95 = age
        if below >= math.ceil(0.95 * (total - 1)) + 1:
            break
    return {
        "tokens/trained": total,
        "staleness/mean": sum(age * count for age, count in tokens.items()) / total if total else math.nan,
        "staleness/p95": float(p95),
        "staleness/max": max(tokens, default=math.nan),
    }
