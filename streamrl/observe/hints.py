"""Hints: what the metrics of a run say is wrong with it, each in one line that names a key and a section to read.

    rows of metrics.jsonl ──feed──▶ Past (means of the last steps, of the first) ──RULES──▶ hints that begin or end

Pure: no clock, no file, no configuration. A rule has two thresholds, one to begin and an easier one to go on, so that
a figure between them does not begin and end a hint with every step. Where a constant below has two values, they are
these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from streamrl.observe.mismatch import has_other_weights, together

Row = Mapping[str, Any]

WINDOW = 10
"""Steps whose mean is judged, the first of a run as well: single steps of a small batch are noise, and of a large model
ten steps are an hour, which is as late as one wants to be told."""

LEAST_SIGNAL = (0.02, 0.05)
"""Share of groups with signal: below one group in fifty the gradient is that of single groups."""

MOST = 0.9
"""Pass rate from which a task counts as solved, and under 1 minus which as out of reach, in words."""

ENTROPY = (0.05, 0.08)
"""Of its start: with a twentieth of it the answers to a prompt are nearly the same one. A task that is solved (MOST)
ends there too, and a reward that RISES shows that something is left to learn from: the quickstart passes a tenth."""

RISES = 0.05
"""Of a standard deviation of the samples, from one window to the next: the mean of ten steps of some hundred samples is
known to a fiftieth."""

MISMATCH = 0.05
"""Nats, mean |log ratio| of tokens that no update has passed: `streamrl audit` allows bfloat16 that much."""

MISMATCH_GROWS = 2.0
"""Times its start: what a server in fp8 has from the first step on is no growth ..."""

MISMATCH_LARGE = 0.15
"""... but beyond this, which the audit allows fp8, it need not grow."""

MISMATCH_STAYS = 0.7
"""Of the figure at which the hint began: below, it ends."""

CUT = (0.3, 0.2)
"""Share of answers: a third of them is no longer the tail of the lengths, and their reward is that of a fragment."""

CUT_FALLS = 0.8
"""Of the window before: a share that falls by a fifth in ten steps is being learned away, as by any untrained model."""

CLIPPED = (0.2, 0.15)
"""Share of tokens: the sweep of docs/staleness.md learns well with 0.08 and slowly with 0.25."""

UNSCORED = (0.05, 0.02)
"""Share of answers: one failure in twenty is no accident of single answers."""

ESS = (0.5, 0.6)
"""Effective sample size: replay.adaptive.ess_low; in docs/staleness.md `recompute` learns little below."""

LOWERED = (0.5, 0.6)
"""Of the highest bound that was admitted: the adaptive bound keeps most of the configured staleness out of use."""

GENERATOR_IDLE = (0.5, 0.4)
"""Share of the time: most GPUs of a run generate, and half of them are wasted."""

LEARNER_IDLE = (0.95, 0.85)
"""Share of a step: the learner is the smaller part of most runs. What its waiting costs is a matter of prices, and the
console always says how long it is; this much is a mistake."""

OTHER_IDLE = 0.2
"""Share up to which the other side counts as busy: where both wait they take turns, and neither is too small."""

LEARNING = "It does not learn"
SPEED = "It is slow"
PAGE = "docs/operations.md"


class Past:
    """The last rows of a run, and the first values of each metric."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=2 * WINDOW)
        self._first: dict[str, list[float]] = {name: [] for name in ("loss/entropy", FRESH)}
        self._count = 0  # rows so far
        self._measured: dict[tuple[str, ...], deque[tuple[int, list[float]]]] = {  # (number of the row, values)
            names: deque(maxlen=WINDOW) for names in MEASURED
        }
        self.most_admitted = 0.0  # of the adaptive bound
        self.moved = ""  # its last move, and why

    def add(self, row: Row) -> None:
        """Take the next row."""
        self._rows.append(row)
        self._count += 1
        for names, found in self._measured.items():
            numbers = [_number(row, name) for name in names]
            if None not in numbers:
                found.append((self._count, [each for each in numbers if each is not None]))
        self.most_admitted = max(self.most_admitted, _number(row, ADMITTED) or 0.0)
        self.moved = str(row.get("staleness/reason") or self.moved)
        for name, values in self._first.items():
            if len(values) < WINDOW and (value := _number(row, name)) is not None:
                values.append(value)

    def mean(self, *names: str) -> float | None:
        """The mean of the metrics' sum over the last WINDOW rows; None where half of the rows do not have it."""
        return _mean(list(self._rows)[-WINDOW:], names)

    def measured(self, *names: str) -> list[list[float]] | None:
        """Metrics of MEASURED in each of the last WINDOW rows that have them; None where so far half as many had, or
        none has for longer than they take to come.
        """
        found = self._measured[names]
        if self._count < WINDOW or 2 * len(found) < WINDOW:
            return None
        gap = max(later - before for (before, _), (later, _) in pairwise(found))
        return None if self._count - found[-1][0] > max(WINDOW, 3 * gap) else [values for _, values in found]

    def mean_measured(self, name: str) -> float | None:
        """The mean of one of them."""
        found = self.measured(name)
        return None if found is None else sum(value for (value,) in found) / len(found)

    def former(self, *names: str) -> float | None:
        """`mean` over the WINDOW rows before those."""
        return _mean(list(self._rows)[:-WINDOW], names)

    @property
    def rises(self) -> bool:
        """Whether the mean reward is clearly above that of the window before."""
        now, former, spread = self.mean("reward/mean"), self.former("reward/mean"), self.mean("reward/std")
        if now is None or former is None or spread is None:
            return False
        return now > former + RISES * spread

    def start(self, name: str) -> float | None:
        """Mean of the first WINDOW values of `loss/entropy` or FRESH; None until they are there."""
        values = self._first[name]
        return sum(values) / WINDOW if len(values) == WINDOW else None


ADMITTED = "staleness/admitted"
FRESH = "offpolicy/log_ratio_mean/s0"  # of tokens that were generated by the very weights that train them

# What is there once a published version, which may be a version in many steps.
MEASURED = (
    (FRESH,), ("mismatch/infinite",), ("mismatch/mean",), ("mismatch/limit",),
    ("mismatch/slope", "mismatch/slope_error"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong."""

    name: str
    judge: Callable[[Past, bool], str | None]  # (past, whether its hint is there already) -> what is wrong
    keys: tuple[str, ...]  # to turn
    section: str  # of PAGE

    @property
    def link(self) -> str:
        """`docs/operations.md#it-is-slow`."""
        return f"{PAGE}#{self.section.lower().replace(' ', '-')}"


@dataclass(slots=True)
class Hint:
    """What was wrong from one step on, up to another.

    >>> Hint(RULES[0], "0% of the groups have signal", begin=40, end=60).line
    'hint over at step 60: 0% of the groups have signal'
    """

    rule: Rule
    text: str  # as it was when it began
    begin: int  # learner step
    end: int | None = None  # None: it goes on

    @property
    def line(self) -> str:
        """What is said when it begins, and once it has ended."""
        if self.end is not None:
            return f"hint over at step {self.end}: {self.text}"
        return f"hint at step {self.begin}: {self.advice}"

    @property
    def advice(self) -> str:
        """What is wrong, which keys to turn, where to read on."""
        return f"{self.text}; try {', '.join(self.rule.keys)} ({self.rule.link})"


class Hints:
    """Takes the rows of a run in the order of its steps.

    Usage:
        hints = Hints()
        for hint in hints.feed(row):
            print(hint.line)
    """

    def __init__(self, former: Iterable[Row] = ()) -> None:
        """`former`: rows that were told before, as by former starts of a run."""
        self._begin_again()
        for row in former:
            self.feed(row)

    def _begin_again(self) -> None:
        self.all: list[Hint] = []  # in the order in which they began
        self.lines: list[tuple[int, str]] = []  # (step, line) of each that began or ended
        self._past = Past()
        self._open: dict[str, Hint] = {}
        self._fed = 0  # rows of `follow` ...
        self._last: Row | None = None  # ... and the last of them

    @property
    def active(self) -> list[Hint]:
        """Those that have not ended."""
        return list(self._open.values())

    def feed(self, row: Row) -> list[Hint]:
        """Take the next row. Returns the hints that begin or end with it."""
        self._past.add(row)
        step, changed = int(row["step"]), list[Hint]()
        for rule in RULES:
            text = rule.judge(self._past, rule.name in self._open)
            if (text is None) == (rule.name not in self._open):
                continue
            if text is None:
                hint = self._open.pop(rule.name)
                hint.end = step
            else:
                hint = self._open[rule.name] = Hint(rule, text, step)
                self.all.append(hint)
            changed.append(hint)
            self.lines.append((step, hint.line))
        return changed

    def follow(self, rows: Sequence[Row]) -> None:
        """Take what is new in `rows`, all rows of a run that goes on; after a resume, all of them again."""
        if self._fed > len(rows) or (self._fed and rows[self._fed - 1] is not self._last):
            self._begin_again()
        for row in rows[self._fed :]:
            self.feed(row)
        self._fed, self._last = len(rows), rows[-1] if rows else None


def hints_of(rows: Iterable[Row]) -> list[Hint]:
    """All hints of a run, by its rows."""
    return Hints(rows).all


def _no_signal(past: Past, shown: bool) -> str | None:
    signal, passed = past.mean("signal_rate"), past.mean("pass_rate")
    if signal is None or passed is None or signal > LEAST_SIGNAL[shown]:
        return None
    others = ("distillation/kl", "critic/loss", "reward/kl")  # what they are of trains every group
    if any(past.mean(name) is not None for name in others):
        return None
    if passed >= MOST:
        which = "every answer is right, the task is too easy"
    elif passed <= 1 - MOST:
        which = "no answer is right, the task is too hard"
    else:
        which = "the answers to a prompt are all right or all wrong"
    return f"{signal:.0%} of the groups had signal in {WINDOW} steps: {which}"


def _entropy(past: Past, shown: bool) -> str | None:
    start, entropy, passed = past.start("loss/entropy"), past.mean("loss/entropy"), past.mean("pass_rate")
    if start is None or entropy is None or passed is None or entropy >= ENTROPY[shown] * start:
        return None
    if passed >= MOST or (not shown and past.rises):
        return None
    return f"the entropy has collapsed: {entropy:.2g} nats a token, {start:.2g} at the start"


def _mismatch(past: Past, shown: bool) -> str | None:
    start, now = past.start(FRESH), past.mean_measured(FRESH)
    if start is None or now is None:
        return None
    limit = max(MISMATCH, min(MISMATCH_GROWS * start, MISMATCH_LARGE))
    if now < (MISMATCH_STAYS * limit if shown else limit):
        return None
    return f"servers and learner differ by {now:.2g} nats a token with the same weights, {start:.2g} at the start"


def _engines(past: Past, shown: bool) -> str | None:
    if infinite := past.mean_measured("mismatch/infinite"):
        return f"of {100 * infinite:.2g}% of the tokens a server, or the learner, has a log-prob that is no number"
    mean, limit = past.mean_measured("mismatch/mean"), past.mean_measured("mismatch/limit")
    if mean is None or limit is None or mean < (MISMATCH_STAYS * limit if shown else limit):
        return None
    return f"a server is {mean:.2g} nats a token from the learner with the same weights, rounding explains {limit:.2g}"


def _other_weights(past: Past, shown: bool) -> str | None:
    slopes = past.measured("mismatch/slope", "mismatch/slope_error")
    if slopes is None:
        return None
    slope, error = together([(value, error) for value, error in slopes])
    if not has_other_weights(slope, error):
        return None
    return f"a server is {slope:.0%} of the way to the weights before those that it reports: it generates with others"


def _cut(past: Past, shown: bool) -> str | None:
    cut, former = past.mean("length/cut"), past.former("length/cut")
    if cut is None or former is None or cut < CUT[shown] or (not shown and cut < CUT_FALLS * former):
        return None
    return f"{cut:.0%} of the answers are cut at the length limit"


def _clipped(past: Past, shown: bool) -> str | None:
    clipped = past.mean("loss/clip_low", "loss/clip_high")
    if clipped is None or clipped < CLIPPED[shown]:
        return None
    return f"{clipped:.0%} of the tokens are clipped"


def _unscored(past: Past, shown: bool) -> str | None:
    failed = past.mean("reward/failed_share")
    if failed is None or failed < UNSCORED[shown]:
        return None
    return f"the scorer failed on {failed:.0%} of the answers"


def _off_policy(past: Past, shown: bool) -> str | None:
    ess = past.mean("offpolicy/ess")
    if ess is None or ess > ESS[shown]:
        return None
    return f"the effective sample size is {ess:.2f}"


def _lowered(past: Past, shown: bool) -> str | None:
    admitted = past.mean(ADMITTED)
    if admitted is None or admitted >= LOWERED[shown] * past.most_admitted:
        return None
    return f"the adaptive bound admits {admitted:.3g} of {past.most_admitted:.3g} steps of staleness ({past.moved})"


def _learner_bound(past: Past, shown: bool) -> str | None:
    generator, learner = past.mean("idle/generator"), past.mean("idle/learner")
    if generator is None or learner is None or generator < GENERATOR_IDLE[shown] or learner > OTHER_IDLE:
        return None
    return f"the generators wait for the learner {generator:.0%} of the time"


def _generator_bound(past: Past, shown: bool) -> str | None:
    generator, learner = past.mean("idle/generator"), past.mean("idle/learner")
    if generator is None or learner is None or learner < LEARNER_IDLE[shown] or generator > OTHER_IDLE:
        return None
    return f"the learner waits for the generators {learner:.0%} of the time"


RULES = (
    Rule("no_signal", _no_signal, ("task.args", "generate.group_size", "replay.filter.signal"), LEARNING),
    Rule("entropy", _entropy, ("algo.entropy", "algo.eps_high", "learner.optimizer.lr"), LEARNING),
    Rule("mismatch", _mismatch, ("algo.weight", "learner.router_replay", "model.dtype"), LEARNING),
    Rule("engines", _engines, ("model.dtype", "generate.server_args", "learner.router_replay"), LEARNING),
    Rule("other_weights", _other_weights, ("publish.transport", "publish.verify_every"), LEARNING),
    Rule("cut", _cut, ("generate.sampling.max_new_tokens", "task.overlong.buffer"), LEARNING),
    Rule("clipped", _clipped, ("replay.max_staleness", "replay.release", "learner.optimizer.lr"), LEARNING),
    Rule("unscored", _unscored, ("task.scoring.timeout", "task.scoring.most_failed"), LEARNING),
    Rule("off_policy", _off_policy, ("replay.max_staleness", "replay.release", "replay.adaptive.enabled"), LEARNING),
    Rule("lowered", _lowered, ("replay.max_staleness", "learner.optimizer.lr", "algo.proximal"), LEARNING),
    Rule("learner_bound", _learner_bound, ("learner.ranks", "learner.tokens_per_micro_batch"), SPEED),
    Rule("generator_bound", _generator_bound, ("generate.workers", "generate.groups_in_flight"), SPEED),
)


def _mean(rows: Sequence[Row], names: Sequence[str]) -> float | None:
    """Over the rows that have all of `names`; None unless there are WINDOW rows, and half of them have."""
    found = [[_number(row, name) for name in names] for row in rows]
    sums = [sum(each for each in values if each is not None) for values in found if None not in values]
    if len(rows) < WINDOW or 2 * len(sums) < WINDOW:
        return None
    return sum(sums) / len(sums)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
