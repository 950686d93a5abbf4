"""Steers the bound by what shows that data teaches no more: clipped and masked tokens, effective sample size, noise.

A token beyond the clip range has no gradient, whatever the effective sample size: a policy that stays near its old
data keeps that size high and learns slowly. So each of three amounts has a range that is left alone:

    share of clipped tokens  clipped_low .. clipped_high      share of masked tokens  masked_low .. masked_high
    -log(effective sample size) of ess_high .. of ess_low

They are means over `patience` steps, and beyond a limit only by more than twice their standard error, which the
differences of successive steps tell (von Neumann, Annals of Mathematical Statistics 12, 1941). One above its range
lowers the bound, all below theirs raise it. Where the gradient is noise, an amount inside its range lowers it too:
with a signal to noise below `least_signal` = 1/20 even Adam's mean (beta1 = 0.9, worth (1 + beta1) / (1 - beta1) = 19
steps) has more noise than signal. Noise alone does nothing: it comes with every task that is nearly solved, and fresher
data does not cure it.

*How far down.* Each amount grows with age, so the bound goes to the age at which it would be at the lower end of its
range, at most to half of the age that was seen. Where a policy drifts one way, a share of tokens grows with age itself,
where it wanders, with the square root; half way between, age is the share to the power 1.5. In docs/staleness.md the
ends, 0.08 at 2.0 steps and 0.30 at 14.3, are about that far apart; its middle, 0.25 at 7.6, is not. -log(ess), about
the square of the distance, is taken in proportion. *How far up*: by `change`. Both as congestion control does (Chiu and
Jain, Computer Networks and ISDN Systems 17, 1989: additive increase, multiplicative decrease).

*Turning.* What was issued before a move is trained for S + 1 further steps. A lowered bound is not judged before that
is over, or the data is as young as it asks; a raised one is not raised again.

*No flapping.* A bound that is lowered behind a raise waits twice as long before its next one, up to 16 times; each
raise from above the age at which it was lowered halves that again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from streamrl.choices import Options
from streamrl.machine import Machine
from streamrl.replay.controllers.base import Controller, Move, Seen

if TYPE_CHECKING:
    from streamrl.config.replay import AdaptiveConfig

CLIPPED, MASKED, ESS = "offpolicy/clipped", "offpolicy/masked", "offpolicy/ess"
SIGNAL, NOISE = "gradient/signal", "gradient/noise"
AGE = "staleness/mean"

# Of the age that was seen: the bound falls to this at most.
FALL = 0.5

# Of the admitted staleness: data that is younger is not held back by the bound, and a higher one would change nothing.
BINDS = 0.5

# Age is proportional to a share of tokens to this power.
GROWTH = 1.5

# Standard errors by which an amount must be beyond a limit: some hundred windows of a run are judged.
MARGIN = 2.0

# Steps over which the spread of an amount is averaged.
SPREAD = 16

# Doublings of the patience before a raise.
MOST_CAUTION = 4


class State(Enum):
    STEADY = auto()  # the trained data was issued under the present bound
    FALLING = auto()  # lowered: older data is still trained
    RISING = auto()  # raised: younger data is still trained


class Event(Enum):
    LOWER = auto()
    RAISE = auto()
    TURNED = auto()  # what was issued before the move is trained


TRANSITIONS = {
    (State.STEADY, Event.LOWER): State.FALLING,
    (State.STEADY, Event.RAISE): State.RISING,
    (State.FALLING, Event.TURNED): State.STEADY,
    # What is younger than the bound and does not teach is a reason to lower it at any time.
    (State.RISING, Event.LOWER): State.FALLING,
    (State.RISING, Event.TURNED): State.STEADY,
}

ADAPTATION = Machine("The adaptive bound", TRANSITIONS, State.STEADY)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a window's data does not teach, in one respect, and the range that is left alone."""

    value: float  # mean of the window
    margin: float  # by which it must be beyond a limit
    low: float
    high: float
    text: str  # as in the metrics
    limit: str  # in words, what it is beyond
    growth: float = 1.0  # age is proportional to the amount to this power

    @property
    def is_good(self) -> bool:
        return self.value + self.margin <= self.low or self.value == 0

    def is_above(self, limit: float) -> bool:
        return self.value - self.margin > limit

    @property
    def fall(self) -> float:
        """The part of the age that is left where the amount is at `low`."""
        return min(FALL, (self.low / self.value) ** self.growth)


class Spread:
    """Variance of a series around its own slow course: half of the mean square of its steps, over the last SPREAD."""

    def __init__(self) -> None:
        self.variance = 0.0
        self._count = 0
        self._last: float | None = None

    def add(self, value: float) -> None:
        if self._last is not None:
            self._count = min(SPREAD, self._count + 1)
            self.variance += ((value - self._last) ** 2 / 2 - self.variance) / self._count
        self._last = value


class Teaching(Controller):
    """By the shares of clipped and masked tokens, the effective sample size, and the gradient's signal to noise."""

    signals = (CLIPPED, MASKED, ESS, SIGNAL, NOISE, AGE)
    uses = frozenset(f"{name}_{end}" for name in ("clipped", "masked", "ess") for end in ("low", "high")) | {
        "least_signal",
        "change",
        "patience",
    }

    def __init__(self, config: AdaptiveConfig, options: Options) -> None:
        super().__init__(config, options)
        self.state = State.STEADY
        self._window: deque[Mapping[str, float]] = deque(maxlen=config.patience)
        self._spreads = {metric: Spread() for metric in (CLIPPED, MASKED, ESS)}
        self._good = 0  # windows in a row with all amounts below their ranges
        self._turned_at = 0  # step whose data was issued after the last move
        self._caution = 0  # doublings
        self._rose = False  # the last move was a raise
        self._ceiling = math.inf  # the age at which it was lowered last

    def judge(self, seen: Seen) -> Move | None:
        if self.state is not State.STEADY and self._is_turned(seen):
            self._move(Event.TURNED)
        if self.state is State.FALLING or not seen.signals.keys() & self._spreads.keys():
            return None  # the data of before the last move, or a step that measured nothing
        self._observe(seen.signals)
        if len(self._window) < self.config.patience:
            return None
        amounts = list(self._amounts())
        age = min(seen.admitted, _mean(self._values(AGE) or [seen.admitted]))
        noise = self._noise()
        if bad := [each for each in amounts if each.is_above(each.low if noise else each.high)]:
            self._good = 0
            return self._lower(seen, age, bad, noise)
        self._good = self._good + 1 if amounts and all(each.is_good for each in amounts) else 0
        waits = self.config.patience * (2**self._caution - 1)
        if self.state is State.RISING or self._good <= waits or age < BINDS * seen.admitted:
            return None
        return self._raise(seen, amounts)

    def memory(self) -> dict[str, float]:
        known = {"state": self.state.value, "turned_at": self._turned_at, "caution": self._caution, "rose": self._rose}
        return {**known, **({"ceiling": self._ceiling} if math.isfinite(self._ceiling) else {})}

    def recall(self, memory: Mapping[str, float]) -> None:
        self.state = State(int(memory.get("state", State.STEADY.value)))
        self._turned_at, self._caution = int(memory.get("turned_at", 0)), int(memory.get("caution", 0))
        self._rose, self._ceiling = bool(memory.get("rose")), memory.get("ceiling", math.inf)

    def _lower(self, seen: Seen, age: float, bad: list[Amount], noise: str | None) -> Move | None:
        staleness = max(seen.lowest, age * min(each.fall for each in bad))
        if staleness >= seen.admitted:
            return None
        self._caution = min(MOST_CAUTION, self._caution + self._rose)
        self._rose, self._ceiling = False, age
        self._begin(Event.LOWER, seen)
        reasons = [f"{each.text} {each.limit}" for each in bad] + ([noise] if noise else [])
        return Move(staleness, f"{', '.join(reasons)} at staleness {age:.3g}")

    def _raise(self, seen: Seen, amounts: list[Amount]) -> Move | None:
        if seen.admitted >= seen.highest:
            return None
        if seen.admitted > self._ceiling:
            self._caution = max(0, self._caution - 1)
        self._rose = True
        self._begin(Event.RAISE, seen)
        return Move(seen.admitted + self.config.change, ", ".join(each.text for each in amounts))

    def _begin(self, event: Event, seen: Seen) -> None:
        self._turned_at = seen.step + math.ceil(seen.admitted) + 2
        self._move(event)

    def _move(self, event: Event) -> None:
        self.state = ADAPTATION.next(self.state, event)
        self._window.clear()
        self._good = 0

    def _is_turned(self, seen: Seen) -> bool:
        young = self.state is State.FALLING and seen.signals.get(AGE, math.inf) <= seen.admitted
        return young or seen.step >= self._turned_at

    def _amounts(self) -> Iterator[Amount]:
        """Those that the window has."""
        config = self.config
        for name, metric, low, high in (
            ("clipped", CLIPPED, config.clipped_low, config.clipped_high),
            ("masked", MASKED, config.masked_low, config.masked_high),
        ):
            if shares := self._values(metric):
                share, limit = _mean(shares), f"(range {low:g}..{high:g})"
                margin = self._margin(metric, len(shares))
                yield Amount(share, margin, low, high, f"{name} {share:.2g}", limit, GROWTH)
        if sizes := self._values(ESS):
            low, high, lack = config.ess_low, config.ess_high, _mean([_lack(size) for size in sizes])
            text, limit = f"ess {_mean(sizes):.2g}", f"(range {low:g}..{high:g})"
            yield Amount(lack, self._margin(ESS, len(sizes)), _lack(high), _lack(low), text, limit)

    def _noise(self) -> str | None:
        """What is said where the window's gradients are noise; None where they are not, or that is not known."""
        signal, noise = sum(self._values(SIGNAL)), sum(self._values(NOISE))
        if noise <= 0 or signal >= self.config.least_signal * noise:
            return None
        return f"gradient signal to noise {max(0.0, signal / noise):.2g} below {self.config.least_signal:g}"

    def _observe(self, signals: Mapping[str, float]) -> None:
        self._window.append(signals)
        for metric, spread in self._spreads.items():
            if metric in signals:
                spread.add(_lack(signals[metric]) if metric == ESS else signals[metric])

    def _margin(self, metric: str, count: int) -> float:
        return MARGIN * math.sqrt(self._spreads[metric].variance / count)

    def _values(self, name: str) -> list[float]:
        """Of the steps that have it."""
        return [signals[name] for signals in self._window if name in signals]


def _lack(ess: float) -> float:
    """-log of an effective sample size in (0, 1]."""
    return -math.log(min(1.0, max(ess, 1e-6)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
