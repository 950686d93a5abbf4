"""What is read from the metrics of one run: its figures, its staleness distribution, its reward curves. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.observe.metrics import incarnation

Rows = Sequence[dict[str, Any]]  # of metrics.jsonl, one a step

WARM_UP = 3  # first steps of a start that no rate counts: servers start, the pipeline of groups is still empty

LAST = 10  # the reward at the end is that of the last tenth of the steps

BUCKETS = ("s0", "s1", "s2", "s3_4", "s5_8", "s9+")  # of `tokens/trained/` in the metrics

# Of the tables, unless the sweep's file says otherwise: one of all figures is wider than a screen.
COLUMNS = ("reward", "reward over the run", "trained", "staleness", "ESS", "KL", "KL per step", "clipped", "masked")

CLIPS = ("loss/clip_low", "loss/clip_high", "loss/clip_dual")  # no token is counted by two of them

TARGET_WINDOW = 10  # steps, whose mean reward has to reach a sweep's target

# What is added up until the target, and in which unit.
TO_TARGET = {
    "tokens to target": ("tokens/generated", "tokens", "generated"),
    "trained to target": ("tokens/trained", "tokens", "trained"),
    "seconds to target": ("time/step", "s", "of steps, waiting included"),
}

CURVE_WINDOW = 5  # steps of the running mean in a reward curve


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run."""

    name: str
    unit: str
    meaning: str
    of: Callable[[Rows], float | None]  # None where the run does not have it


def last_mean(key: str) -> Callable[[Rows], float | None]:
    """The mean over the last tenth of the steps."""
    return lambda rows: _mean([row.get(key) for row in rows[-max(1, len(rows) // LAST) :]])


def mean(key: str) -> Callable[[Rows], float | None]:
    """The mean over all steps; steps in which the metric was not finite are left out."""
    return lambda rows: _mean([row.get(key) for row in rows])


def mean_sum(*keys: str) -> Callable[[Rows], float | None]:
    """The mean over all steps of the sum of several metrics; steps that lack one are left out."""

    def figure(rows: Rows) -> float | None:
        complete = [row for row in rows if all(row.get(key) is not None for key in keys)]
        return _mean([math.fsum(row[key] for key in keys) for row in complete])

    return figure


def token_mean(key: str) -> Callable[[Rows], float | None]:
    """The mean over all trained tokens."""

    def figure(rows: Rows) -> float | None:
        pairs = [(row[key], row["tokens/trained"]) for row in rows if row.get(key) is not None]
        tokens = sum(count for _, count in pairs)
        return sum(value * count for value, count in pairs) / tokens if tokens else None

    return figure


def kl_per_step(rows: Rows) -> float | None:
    """The mean KL over the mean age. A KL grows faster than the age: only points of about one age can be compared."""
    kl, age = mean("offpolicy/kl")(rows), token_mean("staleness/mean")(rows)
    return kl / age if kl is not None and age else None


def largest(key: str) -> Callable[[Rows], float | None]:
    return lambda rows: max((row[key] for row in rows if row.get(key) is not None), default=None)


def rate(key: str) -> Callable[[Rows], float | None]:
    """A second of the steps after the warm-up."""

    def figure(rows: Rows) -> float | None:
        steps = settled(rows)
        seconds = sum(row["time/step"] for row in steps)
        return sum(row[key] for row in steps) / seconds if seconds else None

    return figure


def share_of_time(key: str) -> Callable[[Rows], float | None]:
    """The mean of a fraction of the time after the warm-up, each step weighted by its length."""

    def figure(rows: Rows) -> float | None:
        steps = [row for row in settled(rows) if row.get(key) is not None]
        seconds = sum(row["time/step"] for row in steps)
        return sum(row[key] * row["time/step"] for row in steps) / seconds if seconds else None

    return figure


def sum_to(target: float, key: str) -> Callable[[Rows], float | None]:
    """The sum until the mean reward of TARGET_WINDOW steps was `target`; None where it never was."""

    def figure(rows: Rows) -> float | None:
        rewards = [math.nan if (reward := row.get("reward/mean")) is None else reward for row in rows]
        for end in range(TARGET_WINDOW, len(rows) + 1):  # a window with a step without rewards reaches nothing
            if math.fsum(rewards[end - TARGET_WINDOW : end]) / TARGET_WINDOW >= target:
                return math.fsum(row[key] for row in rows[:end])
        return None

    return figure


FIGURES: tuple[Figure, ...] = (
    Figure("reward", "", "mean reward over the last tenth of the steps", last_mean("reward/mean")),
    Figure("reward over the run", "", "mean reward over all steps: how early it was learned", mean("reward/mean")),
    Figure("pass rate", "share", "wholly right samples over the last tenth of the steps", last_mean("pass_rate")),
    Figure("trained", "tokens/s", "tokens that entered the loss", rate("tokens/trained")),
    Figure("generated", "tokens/s", "output tokens that arrived", rate("tokens/generated")),
    Figure("staleness", "steps", "mean age of a trained token", token_mean("staleness/mean")),
    Figure("staleness p95", "steps", "age that 95% of a step's tokens do not exceed", token_mean("staleness/p95")),
    Figure("oldest", "steps", "age of the oldest trained token", largest("staleness/max")),
    Figure("ESS", "share", "effective sample size of policy over behaviour policy", mean("offpolicy/ess")),
    Figure("KL", "nats/token", "KL of behaviour policy to policy, k3", mean("offpolicy/kl")),
    Figure("KL per step", "nats/token", "KL over staleness: how far a step moves the policy", kl_per_step),
    Figure(
        "mismatch",
        "nats",
        "mean |log ratio| of tokens that train the very weights that drew them, what learner and server differ by; the "
        "updates between several mini batches move it, too",
        mean("offpolicy/log_ratio_mean/s0"),
    ),
    Figure("largest mismatch", "nats", "of those tokens", largest("offpolicy/log_ratio_max/s0")),
    Figure(
        "clipped", "share", "tokens without a gradient, since their ratio has left the clip range", mean_sum(*CLIPS)
    ),
    Figure("masked", "share", "tokens with weight 0", mean("weights/masked")),
    Figure("entropy", "nats", "of the policy over the last tenth of the steps", last_mean("loss/entropy")),
    Figure("length", "tokens", "of an answer", mean("length/mean")),
    Figure("idle learner", "share", "of the time", share_of_time("idle/learner")),
    Figure("idle generator", "share", "of the time", share_of_time("idle/generator")),
    Figure("seconds", "s", "all steps, waiting included", lambda rows: sum(row["time/step"] for row in rows)),
)


def figures_of(target: float | None) -> tuple[Figure, ...]:
    """Those of a sweep; with a target reward, what it took too."""
    if target is None:
        return FIGURES
    until = f"until the mean reward of {TARGET_WINDOW} steps was {target:g}, in the runs where it was"
    taken = [
        Figure(name, unit, f"{what} {until}", sum_to(target, key)) for name, (key, unit, what) in TO_TARGET.items()
    ]
    return (*FIGURES, *taken)


def figures(rows: Rows, target: float | None = None) -> dict[str, float]:
    """Every figure that the run has."""
    found = {figure.name: figure.of(rows) for figure in figures_of(target)}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def staleness_shares(rows: Rows) -> dict[str, float]:
    """Share of the trained tokens of each age bucket, in the order of the ages; they add up to 1."""
    counts = {bucket: sum(row.get(f"tokens/trained/{bucket}") or 0 for row in rows) for bucket in BUCKETS}
    total = sum(counts.values())
    return {bucket: count / total if total else 0.0 for bucket, count in counts.items()}


def reward_curves(rows: Rows) -> dict[str, tuple[list[float], list[float]]]:
    """Running mean of the reward against `steps`, trained `tokens` and `seconds`: (places, values) each.

    Seconds count from the first step on: the servers' start is in nobody's curve. A step without rewards has no place
    of its own, and is in those of the later ones.
    """
    seen = [place for place, row in enumerate(rows) if row.get("reward/mean") is not None]
    rewards = [rows[place]["reward/mean"] for place in seen]
    values = [_mean(rewards[max(0, end - CURVE_WINDOW) : end]) or 0.0 for end in range(1, len(rewards) + 1)]
    places = {
        "steps": [float(row["step"]) for row in rows],
        "tokens": list(itertools.accumulate(float(row["tokens/trained"]) for row in rows)),
        "seconds": list(itertools.accumulate((row["time/step"] for row in rows[1:]), initial=0.0)),
    }
    return {name: ([each[place] for place in seen], values) for name, each in places.items()}


def settled(rows: Rows) -> Rows:
    """The steps after the warm-up of each start of the run; all of them where there are no others."""
    starts = (list(each) for _, each in itertools.groupby(rows, incarnation))
    return [row for each in starts for row in each[WARM_UP:]] or rows


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return math.fsum(finite) / len(finite) if finite else None
