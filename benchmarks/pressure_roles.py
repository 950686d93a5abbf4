"""The processes of `benchmarks/pressure.py`, beside the real replay service: a worker and a learner of set speeds.

    python -m benchmarks.pressure_roles worker RUN 0    the worker's own line to the service; answers take a set time
    python -m benchmarks.pressure_roles learner RUN     the learner's own batch source; a step takes a set time

Both write down what they see, on the one monotonic clock of the machine. `RUN/load.json` has the speeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.fault_roles import Publisher, make_group, open_record, run_role, serve_tickets, write_line
from streamrl.config import Config
from streamrl.generate.link import ServiceLink
from streamrl.generate.request_places import RequestPlaces, submission, want_tickets
from streamrl.learner.batches import ServiceBatches
from streamrl.stream.messages import TicketKey
from streamrl.types import Batch, Group, PolicyVersion, Ticket

LOOK = 0.05  # seconds between two lines of a worker's slots


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How long everything takes, in seconds."""

    group: float  # on average; between half and one and a half of it, by the group's id
    step: float
    pressed_step: float = 0.0
    pressed_after: float | None = None  # since the first batch: from then on a step takes `pressed_step`
    slow_every: int = 0  # one group in so many takes `slow_group`; 0: none
    slow_group: float = 0.0
    slots: int = 0  # requests that a worker's engine runs at once; 0: `group` says how long a group takes
    median: float = 0.0  # tokens of an answer, log-normal
    sigma: float = 0.0
    longest: int = 0
    token: float = 0.0  # seconds, whatever runs beside it

    def is_slow(self, group_id: int) -> bool:
        """A slow group is slow at every attempt."""
        return self.slow_every > 0 and group_id % self.slow_every == self.slow_every // 2

    def seconds(self, group_id: int) -> float:
        """That the group takes: the same in every run."""
        return self.slow_group if self.is_slow(group_id) else self.group * random.Random(group_id).uniform(0.5, 1.5)

    def lengths(self, group_id: int, size: int) -> list[int]:
        """Tokens of each answer of the group: the same in every run."""
        drawn = random.Random(group_id)
        return [
            max(1, min(self.longest, round(drawn.lognormvariate(math.log(self.median), self.sigma))))
            for _ in range(size)
        ]


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's engine, since its start."""

    clock: float
    used: float  # slot-seconds in which a request ran
    held: float  # slot-seconds that were taken: by group, until the last of its answers is done
    tokens: float  # generated


class Seen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker saw: a ticket came, or one of its servers has new weights."""

    clock: float
    group_id: int | None = None
    step: int | None = None


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """One learner step."""

    step: int
    asked: float  # on the clock
    received: float
    ended: float
    pressed: bool
    ages: tuple[int, ...]  # staleness of the oldest token of each group, in learner steps
    slow: int  # slow groups with answers
    placeholders: int  # groups without
    held: int  # groups that the service held, these included
    busy: float  # share of the time in which the generators had a request running, since the batch before
    tokens: int = 0


def load_path(run_folder: Path) -> Path:
    return run_folder / "load.json"


def seen_path(run_folder: Path, index: int) -> Path:
    return run_folder / f"seen-{index}.jsonl"


def slots_path(run_folder: Path, index: int) -> Path:
    return run_folder / f"slots-{index}.jsonl"


def trained_path(run_folder: Path) -> Path:
    return run_folder / "trained.jsonl"


class Meter:
    """Seconds with at least one request running, as a heartbeat tells them."""

    def __init__(self) -> None:
        self._running = 0
        self._seconds = self._since = 0.0

    @property
    def busy(self) -> float:
        return self._seconds + (time.monotonic() - self._since if self._running else 0.0)

    async def run(self, seconds: float) -> None:
        """One request."""
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        await asyncio.sleep(seconds)
        self._running -= 1
        if not self._running:
            self._seconds += time.monotonic() - self._since


class SlotMeter:
    """What an engine's slots do. Tokens count as they are drawn, at the pace of `Load.token`."""

    def __init__(self, token: float, slots: int) -> None:
        self._token = token
        self._slots = slots
        self._used = self._held = 0  # now
        self._sums = [0.0, 0.0]
        self._since = time.monotonic()

    def change(self, used: int = 0, held: int = 0) -> None:
        now = time.monotonic()
        self._sums[0] += self._used * (now - self._since)
        self._sums[1] += min(self._slots, self._held) * (now - self._since)  # what is beyond them waits
        self._since, self._used, self._held = now, self._used + used, self._held + held

    @property
    def line(self) -> Slots:
        self.change()
        used, held = self._sums
        return Slots(clock=self._since, used=used, held=held, tokens=used / self._token)


async def run_engine(config: Config, run_folder: Path, index: int, load: Load) -> None:
    """A worker whose engine has `load.slots`; it submits as `generate.submission` says, by the real rules."""
    record, slots = open_record(seen_path(run_folder, index)), open_record(slots_path(run_folder, index))
    meter, by_sample, size = SlotMeter(load.token, load.slots), submission(config), config.generate.group_size
    engine = asyncio.Semaphore(load.slots)
    places = RequestPlaces(by_sample) if by_sample else None

    async def sample(key: TicketKey, length: int) -> None:
        async with places.place(key) if places else contextlib.nullcontext(), engine:
            meter.change(used=1, held=1 if places else 0)
            await asyncio.sleep(length * load.token)
            meter.change(used=-1, held=-1 if places else 0)

    async def answer(ticket: Ticket, version: Callable[[], PolicyVersion]) -> Group:
        begun, lengths, key = version(), load.lengths(ticket.group_id, size), (ticket.group_id, ticket.attempt)
        if places:
            places.open(key)
        meter.change(held=0 if places else size)
        await asyncio.gather(*(sample(key, length) for length in lengths))
        meter.change(held=0 if places else -size)
        if places:
            places.close(key)
        made = [make_group(ticket, begun, 1, f"generator-{index}", length) for length in lengths]
        return msgspec.structs.replace(made[0], samples=tuple(group.samples[0] for group in made))

    async def beside(link: ServiceLink) -> None:
        async def look() -> None:
            while True:
                write_line(slots, meter.line)
                await asyncio.sleep(LOOK)

        await asyncio.gather(look(), *([want_tickets(places, link.limit)] if places else []))

    def note(**seen: int) -> None:
        write_line(record, Seen(clock=time.monotonic(), **seen))

    await serve_tickets(config, run_folder, index, answer, note=note, beside=beside)


async def run_worker(config: Config, run_folder: Path, index: int) -> None:
    """A generator worker that takes the time that `Load` says for a group, and writes down what it sees."""
    load = msgspec.json.decode(load_path(run_folder).read_bytes(), type=Load)
    if load.slots:
        await run_engine(config, run_folder, index, load)
        return
    record, meter = open_record(seen_path(run_folder, index)), Meter()
    size, tokens = config.generate.group_size, config.generate.sampling.max_new_tokens

    async def answer(ticket: Ticket, version: Callable[[], PolicyVersion]) -> Group:
        begun = version()  # the oldest token is what counts, so that an update on the way changes nothing
        await meter.run(load.seconds(ticket.group_id))
        return make_group(ticket, begun, size, f"generator-{index}", tokens)

    def note(**seen: int) -> None:
        write_line(record, Seen(clock=time.monotonic(), **seen))

    await serve_tickets(config, run_folder, index, answer, busy=lambda: meter.busy, note=note)


def run_learner(config: Config, run_folder: Path) -> None:
    """Take batches, let the time of a step pass, and write them down, until the service stops or SIGTERM comes."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    load = msgspec.json.decode(load_path(run_folder).read_bytes(), type=Load)
    record = open_record(trained_path(run_folder))
    version = PolicyVersion(0)
    source = ServiceBatches(config, run_folder, version)
    publisher = Publisher(config, run_folder, version)
    publisher.start()
    began = None
    while not stop.is_set() and not source.begun(config.learner.tick):
        pass
    publisher.newest = version
    asked = time.monotonic()
    while not stop.is_set():
        delivery = source.next(version.step, config.learner.tick)
        if delivery.kind == "stop":
            break
        if delivery.batch is None:
            continue
        received = time.monotonic()
        began = began or received
        pressed = load.pressed_after is not None and received - began > load.pressed_after
        stop.wait(load.pressed_step if pressed else load.step)
        version = PolicyVersion(version.step + 1)
        source.trained(version, {})
        publisher.newest = version
        ended = time.monotonic()
        write_line(record, _trained(delivery.batch, delivery.stats, load, (asked, received, ended), pressed))
        asked = ended
        if version.step % config.checkpoint.every == 0:
            source.saved(version, oldest=version.step)
    source.end(None)
    publisher.ending.set()
    publisher.join()
    source.close()


def _trained(
    batch: Batch, stats: dict[str, float], load: Load, times: tuple[float, float, float], pressed: bool
) -> Trained:
    answered = [group for group in batch.groups if group.answered]
    return Trained(
        step=batch.step,
        asked=times[0],
        received=times[1],
        ended=times[2],
        pressed=pressed,
        ages=tuple(max(0, batch.step - group.oldest.step) for group in answered if group.oldest is not None),
        slow=sum(load.is_slow(group.group_id) for group in answered),
        placeholders=len(batch.groups) - len(answered),
        held=int(stats["buffer/groups"]) + len(batch.groups),
        busy=1.0 - stats["idle/generator"],
        tokens=sum(group.tokens for group in batch.groups),
    )


if __name__ == "__main__":
    sys.exit(run_role(__doc__, run_worker, run_learner))
