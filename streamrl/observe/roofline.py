"""How fast a run is, how fast each side alone would be, and which role held it up. Pure.

    trained tokens/s now  <=  min(tokens/s if the generators were infinitely fast,
                                  tokens/s if the learner were infinitely fast)

Both limits take a side's own speed from the run itself: what the other side took of the same machine is in them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.observe.intervals import Interval, total
from streamrl.observe.timeline import START, GroupSpan, Timeline, Track, slices

Holder = Literal["start", "generators", "learner", "publish", "hand-over", "nobody"]

# Who holds the run up at an instant, and what that means.
HOLDERS: dict[Holder, str] = {
    "start": "a role is not ready",
    "generators": "the learner waits for groups that are being generated",
    "learner": "generators wait for tickets while the learner works",
    "publish": "servers are paused, or the learner hands its weights over, and the other side waits",
    "hand-over": "both sides wait: groups, tickets or batches are under way",
    "nobody": "both sides work",
}

# The share of a worker's generating time, with the most groups at once, that its own speed is taken from: what it does
# at the load that it would have if it never waited.
FULL = 0.25


# Share of the speed without pauses: what pauses cost is reported where it is more than a few percent.
_WORTH_TELLING = 0.95


@dataclass(frozen=True, slots=True)
class Roofline:
    """Trained tokens a second over a stretch of a run: as it was, and at the limit of each side.

    Example: `Roofline(seconds=30, now=900, learner=1000, generators=2400)`: the learner limits, gap 10%.
    """

    seconds: float  # of the stretch
    now: float  # tokens/s
    learner: float  # tokens/s if the generators were infinitely fast; inf where the learner did nothing
    generators: float  # tokens/s if the learner were infinitely fast; inf where nothing was generated
    unpaused: float = math.inf  # the same if new weights came in no time

    @property
    def limit(self) -> float:
        """The lower of the two, tokens/s."""
        return min(self.learner, self.generators)

    @property
    def limited_by(self) -> str:
        return "learner" if self.learner <= self.generators else "generators"

    @property
    def gap(self) -> float:
        """Share of the limit that is not reached, 0..1."""
        return max(0.0, 1.0 - self.now / self.limit) if 0 < self.limit < math.inf else 0.0

    def __str__(self) -> str:
        if not self.now:
            return "no step yet"
        sides = f"generators infinitely fast {_rate(self.learner)}, learner infinitely fast {_rate(self.generators)}"
        gap = f"{self.gap:.0%} below the limit, set by the {self.limited_by}"
        if self.limited_by == "generators" and self.generators < _WORTH_TELLING * self.unpaused < math.inf:
            gap += f" ({_rate(self.unpaused)} without their pauses for new weights)"
        return f"{self.now:,.0f} tokens/s trained; {sides}; {gap}"


def roofline(timeline: Timeline, rows: Sequence[dict[str, Any]]) -> Roofline | None:
    """Over the metrics rows of steps that follow one another, from the end of the first to that of the last.

    None where they do not span any time, as two steps are needed, and where nothing is generated.
    """
    learner = timeline.learner
    if len(rows) < 2 or learner is None or not timeline.generators or rows[-1]["time"] <= rows[0]["time"]:
        return None
    begin, end = rows[0]["time"], rows[-1]["time"]
    trained = sum(row.get("tokens/trained") or 0.0 for row in rows[1:])
    phases = learner.seconds(begin, end)
    lived = sum(seconds for name, seconds in phases.items() if name != START)
    if not lived:
        return None
    worked = lived - phases.get("wait", 0.0)
    made = [production(track, begin, end) for track in timeline.generators]
    generated = sum(each.tokens for each in made)
    per_token = trained / generated if generated else math.inf  # what is trained of a generated token
    return Roofline(
        seconds=end - begin,
        now=trained / lived,
        learner=trained / worked if worked > 0 else math.inf,
        generators=per_token * sum(each.alone for each in made) if generated else math.inf,
        unpaused=per_token * sum(each.unpaused for each in made) if generated else math.inf,
    )


@dataclass(frozen=True, slots=True)
class Production:
    """What one worker made over a stretch, and how fast it would be alone."""

    tokens: float = 0.0  # output tokens
    alone: float = 0.0  # tokens/s if it never waited for a ticket; its pauses stay
    unpaused: float = 0.0  # tokens/s without pauses, too


def production(track: Track, begin: float, end: float) -> Production:
    """What a worker made between two instants.

    A group's tokens are spread evenly over its time without pauses. The speed is that of the `FULL` share of the time
    with the most groups open, or the mean one where that is higher; a pause costs each token what it cost on the
    average.
    """
    pauses = [(phase.begin, phase.end) for phase in track.phases(begin, end) if phase.name == "pause"]
    load = list(_load(track.groups, pauses, begin, end))
    tokens, busy = sum(seconds * rate for seconds, _, rate in load), sum(seconds for seconds, _, _ in load)
    if not tokens:
        return Production()
    left, level = FULL * busy, 0
    full_seconds = full_tokens = 0.0
    for seconds, count, rate in sorted(load, key=lambda step: -step[1]):
        if left <= 0 and count < level:
            break
        left, level = left - seconds, count
        full_seconds, full_tokens = full_seconds + seconds, full_tokens + seconds * rate
    rate = max(full_tokens / full_seconds, tokens / busy)
    return Production(tokens, 1.0 / (1.0 / rate + total(pauses) / tokens), rate)


def holders(timeline: Timeline, begin: float, end: float) -> Iterator[tuple[float, float, dict[Holder, float]]]:
    """(begin, end, share of each holder) of the stretches between two instants; the shares of one add up to 1.

    With several generators an instant is shared: while the learner works and one of four waits, a quarter of the
    instant is held up by the learner.
    """
    learner = timeline.learner
    tracks = [(track, "generator") for track in timeline.generators] + ([(learner, "learner")] if learner else [])
    changes = sorted(
        (instant, change, phase.name, side)
        for track, side in tracks
        for phase in track.phases(begin, end)
        for instant, change in ((phase.begin, 1), (phase.end, -1))
    )
    count: dict[str, Counter[str]] = {"learner": Counter(), "generator": Counter()}
    place = begin
    for instant, change, name, side in changes:
        if instant > place:
            yield place, instant, _shares(count["learner"], count["generator"])
            place = instant
        count[side][name] += change
    if place < end:
        yield place, end, _shares(count["learner"], count["generator"])


def held_up(timeline: Timeline, begin: float, end: float) -> dict[Holder, float]:
    """Seconds that each held the run up between two instants; they add up to the time between."""
    sums: dict[Holder, float] = dict.fromkeys(HOLDERS, 0.0)
    for since, until, shares in holders(timeline, begin, end):
        for holder, share in shares.items():
            sums[holder] += share * (until - since)
    return sums


def bottlenecks(timeline: Timeline, begin: float, end: float) -> list[Holder]:
    """Who held up most of every second between two instants."""
    sums: list[dict[Holder, float]] = [defaultdict(float) for _ in range(max(0, math.ceil(end - begin)))]
    for since, until, shares in holders(timeline, begin, end):
        for index, seconds in slices(since - begin, until - begin):
            for holder, share in shares.items():
                sums[index][holder] += share * seconds
    return [max(each, key=each.__getitem__, default="start") for each in sums]


def _shares(learner: Counter[str], generators: Counter[str]) -> dict[Holder, float]:
    """Who holds up an instant at which so many learners and generators are in each phase."""
    present = sum(count for name, count in generators.items() if name != START)
    doing = next((name for name, count in learner.items() if count > 0), START)
    if doing == START or present <= 0:
        return {"start": 1.0}
    if doing == "wait":
        if generators["generate"] > 0:
            return {"generators": 1.0}
        return {"publish": 1.0} if generators["pause"] > 0 else {"hand-over": 1.0}
    waiting, paused = generators["wait"] / present, generators["pause"] / present
    if doing == "publish":
        return {"publish": waiting + paused, "nobody": 1.0 - waiting - paused}
    return {"learner": waiting, "publish": paused, "nobody": 1.0 - waiting - paused}


def _load(
    groups: Sequence[GroupSpan], pauses: list[Interval], begin: float, end: float
) -> Iterator[tuple[float, int, float]]:
    """(seconds, groups open, tokens a second) of the stretches with a group open, pauses left out."""
    running = _running(pauses)
    changes: list[tuple[float, int, float]] = []
    for group in groups:
        since, until = running(max(begin, group.begin)), running(min(end, group.end))
        if until > since:
            rate = group.tokens / (running(group.end) - running(group.begin))
            changes += [(since, 1, rate), (until, -1, -rate)]
    place, count, rate = 0.0, 0, 0.0
    for instant, change, difference in sorted(changes):
        if count and instant > place:
            yield instant - place, count, max(0.0, rate)
        place, count, rate = instant, count + change, rate + difference


def _running(pauses: list[Interval]) -> Callable[[float], float]:
    """A clock that stops in the pauses."""
    begins = [begin for begin, _ in pauses]
    before = list(itertools.accumulate((end - begin for begin, end in pauses), initial=0.0))

    def clock(instant: float) -> float:
        index = bisect.bisect_right(begins, instant)
        paused = before[index]
        if index and instant < pauses[index - 1][1]:
            paused -= pauses[index - 1][1] - instant
        return instant - paused

    return clock


def _rate(tokens_per_second: float) -> str:
    return "without limit" if math.isinf(tokens_per_second) else f"{tokens_per_second:,.0f}"
