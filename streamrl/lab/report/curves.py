"""The curves of the page: which metrics are in which panel, and a run's values, few enough to be drawn."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.lab.report.runs import Row, Run
from streamrl.observe.metrics import METRICS
from streamrl.types import FAILURES

# of one curve. Of a longer run each point is the mean of the steps that it represents, with their extremes beside it.
POINTS = 600

# of one metric in all runs together, which keeps the page small when there are many.
ALL_POINTS = 2400

# of staleness, as in the names of the metrics
BUCKETS = ("s0", "s1", "s2", "s3_4", "s5_8", "s9+")


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram."""

    section: str
    title: str
    unit: str
    metrics: tuple[str, ...]


PANELS = (
    Panel("Learning", "Reward", "", ("reward/mean", "reward/std")),
    Panel("Learning", "Pass rate", "share", ("pass_rate", "signal_rate")),
    Panel("Learning", "Output length", "tokens", ("length/mean", "length/p95")),
    Panel("Learning", "Answers cut at the length limit", "share", ("length/cut",)),
    Panel("Learning", "Entropy", "nats/token", ("loss/entropy",)),
    Panel(
        "Off-policy",
        "Staleness of trained tokens",
        "steps",
        ("staleness/mean", "staleness/p95", "staleness/max", "staleness/admitted"),
    ),
    Panel("Off-policy", "Effective sample size", "share", ("offpolicy/ess", "weights/ess")),
    Panel("Off-policy", "KL to the behaviour policy", "nats/token", ("offpolicy/kl",)),
    Panel("Off-policy", "Server against learner, same weights", "nats", ("mismatch/mean", "mismatch/limit")),
    Panel("Off-policy", "Clipped tokens", "share", ("loss/clip_low", "loss/clip_high", "loss/clip_dual")),
    Panel("Off-policy", "Before the first update", "share", ("offpolicy/clipped", "offpolicy/masked")),
    Panel("Off-policy", "Tokens with weight 0", "share", ("weights/masked",)),
    Panel("Off-policy", "KL to the reference", "nats/token", ("loss/kl",)),
    Panel("Off-policy", "Reverse KL to the teacher", "nats/token", ("distillation/kl",)),
    Panel("Critic", "Variance of returns that values explain", "share", ("critic/explained_variance",)),
    Panel("Critic", "Values and returns", "", ("values/mean", "returns/mean")),
    Panel("Critic", "Loss of the critic", "", ("critic/loss",)),
    Panel("Optimiser", "Loss", "", ("loss/total", "loss/held_out")),
    Panel("Optimiser", "Gradient norm", "", ("grad_norm",)),
    Panel("Optimiser", "Norm of the parameters", "", ("params_norm",)),
    Panel("Optimiser", "Signal and noise of the gradient", "", ("gradient/signal", "gradient/noise")),
    Panel("Optimiser", "Gradient entries that are zero", "share", ("grad_zeros",)),
    Panel("Optimiser", "Learning rate", "", ("lr",)),
    Panel("Optimiser", "Updates not made", "updates", ("steps/skipped", "steps/spikes")),
    Panel("Throughput", "Tokens per second", "tokens/s", ("tokens/trained_per_s", "tokens/generated_per_s")),
    Panel("Throughput", "Model FLOPs of a learner rank", "TFLOP/s", ("learner/tflops",)),
    Panel("Throughput", "Model FLOPs utilisation", "share", ("learner/mfu",)),
    Panel("Throughput", "Idle", "share", ("idle/learner", "idle/generator")),
    Panel("Throughput", "Tokens of a pass over drafts", "tokens", ("speculation/accept_length",)),
    Panel("Throughput", "Seconds of a step", "s", ("time/step", "time/wait", "time/forward_backward")),
    Panel("Throughput", "Groups waiting in the buffer", "groups", ("buffer/groups",)),
    Panel("Throughput", "Tickets held back", "tickets", ("release/held",)),
    Panel("Throughput", "Lead time of tickets", "s", ("release/lead", "release/quantile")),
    Panel(
        "Selection",
        "Groups since the last batch",
        "groups",
        ("selection/generated/groups", "selection/dropped/groups"),
    ),
    Panel("Selection", "Answers on which the scorer raised", "samples", ("reward/failed",)),
    Panel("Selection", "Answers whose scorer failed", "share", ("reward/failed_share",)),
    Panel(
        "Selection",
        "Samples that were not trained",
        "samples",
        ("samples/failed", "samples/masked", *(f"samples/failed_{reason}" for reason in FAILURES)),
    ),
    Panel(
        "Selection",
        "Given up, issued again, over age",
        "groups",
        ("selection/placeholders", "selection/reissued", "selection/over_age"),
    ),
)

_EVALUATED = re.compile(r"eval/([\w.-]+)/(pass@\d+|greedy)")

# Of metrics that have a name of the run's own: section, title, unit. A panel has LINES of them at most.
_NAMED = (
    (re.compile(r"reward/part/[\w.-]+"), ("Learning", "Reward parts", "")),
    (re.compile(r"task/[\w.-]+/reward/mean"), ("Learning", "Reward by task", "")),
    (re.compile(r"task/[\w.-]+/pass_rate"), ("Learning", "Pass rate by task", "share")),
    (re.compile(r"task/[\w.-]+/groups"), ("Selection", "Groups by task", "share")),
)
LINES = 8  # colours of the page

_MEANINGS = {metric.name: metric.meaning for metric in METRICS}


def panels(described: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The panels in which any of the runs has something other than zero, each metric with its meaning."""
    present: dict[str, bool] = {}
    for run in described:
        for name, curve in run["curves"]["metrics"].items():
            present[name] = present.get(name, False) or any(curve["y"])
    found = []
    for panel in (*_evaluated(present), *PANELS, *_named(present)):
        names = [name for name in panel.metrics if present.get(name)]
        if names:
            metrics = [{"name": name, "meaning": _MEANINGS.get(name, "")} for name in names]
            found.append({"section": panel.section, "title": panel.title, "unit": panel.unit, "metrics": metrics})
    return found


def describe(run: Run, runs: int = 1) -> dict[str, Any]:
    """The three axes and the values of each metric, as JSON: `{"step": [...], ..., "metrics": {name: {"y": [...]}}}`.

    tokens: trained so far; seconds: since the run's begin. A value that was not finite, or not there, is null.
    """
    rows = run.rows
    size = math.ceil(len(rows) / max(50, min(POINTS, ALL_POINTS // runs)))
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)] if rows else []
    trained = list(itertools.accumulate(row.get("tokens/trained") or 0 for row in rows))
    names = {name for panel in PANELS for name in panel.metrics}
    names |= {name for row in rows for name in row if _has_own_name(name)}
    metrics = {name: _curve(blocks, name) for name in sorted(names) if any(row.get(name) is not None for row in rows)}
    return {
        "step": [block[-1]["step"] for block in blocks],
        "tokens": [trained[min(len(rows), (index + 1) * size) - 1] for index in range(len(blocks))],
        "seconds": [round(block[-1]["time"] - run.begin, 2) for block in blocks],
        "steps_a_point": size,
        "metrics": metrics,
        "staleness": {bucket: _shares(blocks, bucket) for bucket in BUCKETS},
    }


def _evaluated(present: dict[str, bool]) -> list[Panel]:
    """One panel for each evaluated task."""
    tasks: dict[str, list[str]] = {}
    for name in sorted(present):
        if match := _EVALUATED.fullmatch(name):
            tasks.setdefault(match[1], []).append(name)
    return [Panel("Evaluation", f"Evaluation of {task}", "share", tuple(names)) for task, names in tasks.items()]


def _named(present: Iterable[str]) -> Iterator[Panel]:
    """Panels of reward parts, and of the tasks of a mix."""
    for pattern, (section, title, unit) in _NAMED:
        names = sorted(filter(pattern.fullmatch, present))
        for first in range(0, len(names), LINES):
            yield Panel(section, title, unit, tuple(names[first : first + LINES]))


def _has_own_name(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_EVALUATED, *(pattern for pattern, _ in _NAMED)))


def _curve(blocks: Sequence[Sequence[Row]], name: str) -> dict[str, list[float | None]]:
    """Means of the blocks; of blocks of several steps the extremes too."""
    values = [[row[name] for row in block if row.get(name) is not None] for block in blocks]
    curve = {"y": [brief(sum(block) / len(block)) if block else None for block in values]}
    if any(len(block) > 1 for block in values):
        curve["low"] = [brief(min(block)) if block else None for block in values]
        curve["high"] = [brief(max(block)) if block else None for block in values]
    return curve


def _shares(blocks: Sequence[Sequence[Row]], bucket: str) -> list[float]:
    """The share of each block's trained tokens that are of one staleness bucket."""
    shares = []
    for block in blocks:
        tokens = sum(row.get("tokens/trained") or 0 for row in block)
        of_bucket = sum(row.get(f"tokens/trained/{bucket}") or 0 for row in block)
        shares.append(round(of_bucket / tokens, 4) if tokens else 0.0)
    return shares


def brief(value: float) -> float:
    """Five digits, which is more than a diagram shows."""
    return float(f"{value:.5g}")
