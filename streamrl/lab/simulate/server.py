"""One inference server as a model: samples that share it, work that halts them, and the versions of their tokens.

    start(group) ─▶ waiting ─▶ a prefill ─▶ running, all at the same pace ─▶ a sample ends ─▶ the last one: Done
                                              ▲ halted by `debt`: prefills, ends of samples, updates

A prefill takes all that waits when it begins, and what comes meanwhile waits for the next one. A group of several
samples needs two, as SGLang answers a request for several: one for their common prompt, one for the samples.

All running samples have drawn the same number of tokens since any moment: `drawn`, a count that grows by one in each
decoding step. The prefill draws a sample's first token: one that begins at a count of 40 and has 12 tokens ends at 51,
whatever happens in between. So one heap of such counts is the whole state, and the versions of its tokens follow from
the counts of the updates.

Pure: the time is an argument.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# The values of `publish.interruption` after which a server computes the caches of what it runs again.
RECOMPUTING = ("retract", "abort")

Span = tuple[int, int, int]  # (version's step, first token, token behind the last)


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """What a server takes, in seconds. Example: 1 ms a step and 0.1 ms a sample give 16 samples 6,154 tokens/s."""

    step: float  # a decoding step, whatever runs
    sample: float  # a decoding step more for each running sample
    prefill: float = 0.0  # halts all: a prefill, whatever is in it
    start: float = 0.0  # halts all: a sample's first work, its part of a prefill and of the request
    end: float = 0.0  # halts all: a sample's last work
    again: float = 0.0  # halts all: a running sample after an update, in a prefill that computes its cache again; or 0
    latency: float = 0.0  # halts nothing: a group between its last token and the service, with its reward
    max_running: int = 4096  # samples at once; the others wait

    def pace(self, running: int) -> float:
        """Seconds of a decoding step with so many samples."""
        return self.step + self.sample * running

    def rate(self, running: int) -> float:
        """Tokens a second with so many samples and nothing that halts them."""
        return running / self.pace(running)


@dataclass(slots=True)
class Done:
    """A group whose last sample has ended."""

    group_id: int
    time: float  # seconds, when it reaches the service
    spans: list[list[Span]]  # of each sample, in the order of its lengths


@dataclass(slots=True)
class _Open:
    """A group with samples that have not ended."""

    left: int
    spans: list[list[Span]]


# A running one: the count of drawn tokens at which it ends, its group and place there, the count at which it began,
# and its length. A tuple, because a heap of millions is compared.
_Sample = tuple[float, int, int, float, int]


class GenerationServer:
    """One server. Call `advance` first, with times that never fall.

    >>> server = GenerationServer(ServerSpeed(step=0.01, sample=0.0))
    >>> server.start(7, [3, 5], now=0.0)
    >>> [(done.group_id, done.time) for done in server.advance(1.0)]
    [(7, 0.04)]
    """

    def __init__(self, speed: ServerSpeed, version: int = 0, *, by_sample: bool = False) -> None:
        """`by_sample`: each sample is a request of its own, without a prefill of the group's common prompt before."""
        self._speed = speed
        self._by_sample = by_sample
        self._now = 0.0
        self._drawn = 0.0
        self._debt = 0.0  # seconds of work before the next token is drawn
        self._running: list[_Sample] = []
        self._new: list[tuple[int, Sequence[int]]] = []  # groups whose common prompt waits, lengths
        self._waiting: deque[tuple[int, int, int]] = deque()  # group, place, length
        self._open: dict[int, _Open] = {}
        self._counts, self._versions = [0.0], [version]  # at which count of drawn tokens which version came
        self._busy, self._since = 0.0, 0.0
        self._asleep = False  # it has lent its device

    @property
    def groups(self) -> int:
        """Groups that it has."""
        return len(self._open)

    @property
    def samples(self) -> int:
        """Samples that run or wait."""
        return len(self._running) + len(self._waiting) + sum(len(lengths) for _, lengths in self._new)

    @property
    def next_change(self) -> float:
        """When the next sample ends or a prefill begins, if nothing else happens; infinite for an idle server."""
        if self._has_prefill() and not self._asleep:
            return self._now + self._debt
        if not self._running or self._asleep:
            return float("inf")
        left = max(0.0, self._running[0][0] - self._drawn)
        return self._now + self._debt + left * self._speed.pace(len(self._running))

    def busy(self, now: float) -> float:
        """Seconds with at least one group so far."""
        return self._busy + (now - self._since if self._open and not self._asleep else 0.0)

    def start(self, group_id: int, lengths: Sequence[int], now: float) -> None:
        """A group comes. `lengths`: tokens of each sample; one without tokens is ended as it starts."""
        if not self._open:
            self._since = now
        self._open[group_id] = _Open(len(lengths), [[] for _ in lengths])
        if len(lengths) > 1 and not self._by_sample:
            self._new.append((group_id, lengths))
        else:
            self._waiting.extend((group_id, place, length) for place, length in enumerate(lengths))
        if not self._debt and not self._asleep and self._has_prefill():
            self._fill()

    def sleep(self, now: float) -> None:
        """Draw nothing from now on."""
        self._busy, self._asleep = self.busy(now), True

    def wake(self, now: float) -> None:
        """Go on: the cache of all that runs is computed again."""
        self._since, self._asleep = now, False
        self._compute_again()

    def update(self, version: int, seconds: float) -> None:
        """New weights: no token is drawn for `seconds`, and the next one is of `version`."""
        if not self._asleep:
            self._debt += seconds
            self._compute_again()
        self._counts.append(self._drawn)
        self._versions.append(version)

    def _compute_again(self) -> None:
        if self._running and self._speed.again:
            self._debt += self._speed.prefill + self._speed.again * len(self._running)

    def advance(self, now: float) -> list[Done]:
        """What has ended up to `now`, in order."""
        done: list[Done] = []
        while (due := self.next_change) <= now:
            self._pass(due)
            if self._has_prefill():
                self._debt = 0.0  # what rounding left of it
                self._fill()
                continue
            sample = heapq.heappop(self._running)
            self._drawn = max(self._drawn, sample[0])  # the clock rounds, the count must not
            self._debt += self._speed.end
            self._end(sample, done)
        self._pass(now)
        return done

    def _pass(self, now: float) -> None:
        """Work off the debt, then draw."""
        elapsed = 0.0 if self._asleep else max(0.0, now - self._now)
        paid = min(elapsed, self._debt)
        self._debt -= paid
        if self._running:
            self._drawn += (elapsed - paid) / self._speed.pace(len(self._running))
        self._now = max(self._now, now)

    def _has_prefill(self) -> bool:
        return bool(self._new) or (bool(self._waiting) and len(self._running) < self._speed.max_running)

    def _fill(self) -> None:
        """A prefill of all that waits, as far as there is room."""
        self._debt += self._speed.prefill
        while self._waiting and len(self._running) < self._speed.max_running:
            group_id, place, length = self._waiting.popleft()
            self._debt += self._speed.start
            heapq.heappush(self._running, (self._drawn + max(0, length - 1), group_id, place, self._drawn, length))
        for group_id, lengths in self._new:
            self._waiting.extend((group_id, place, length) for place, length in enumerate(lengths))
        self._new.clear()

    def _end(self, sample: _Sample, done: list[Done]) -> None:
        _, group_id, place, begins, length = sample
        group = self._open[group_id]
        group.spans[place] = self._spans(begins, length)
        group.left -= 1
        if group.left:
            return
        del self._open[group_id]
        if not self._open:
            self._busy += self._now - self._since
        done.append(Done(group_id, self._now + self._debt + self._speed.latency, group.spans))

    def _spans(self, begins: float, length: int) -> list[Span]:
        """Which version drew which tokens of a sample: as many as its length, versions never fall."""
        first, last = bisect_right(self._counts, begins) - 1, len(self._counts) - 1
        spans: list[Span] = []
        begin = 0
        for place in range(first, last + 1):  # an update that comes before the first token is at the same count
            count = length if place == last else 1 + int(self._counts[place + 1] - begins)
            end = min(length, max(begin, count))
            if end > begin:
                spans.append((self._versions[place], begin, end))
            begin = end
        return spans
