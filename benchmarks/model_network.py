"""The network, the clock and the memory that the roles of the model check share.

    Wire     the service's end, as `Router`; Ends, End: those of its peers, as `Dealer`
    World    time, chance, what survives a learner, what is counted

A connection that breaks loses what was under way, in both directions, and nothing else: so the numbers of the real
sockets show it, or the next word does not come.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.observe.events import EventLog
from streamrl.stream.codec import decode_batch, encode_group
from streamrl.stream.messages import BatchHeader, Buffer, Message, decode, encode
from streamrl.stream.sockets import Received, ReceivedBatch, _Numbers
from streamrl.types import Batch, Group, Ledger


class Time:
    """The module `time` of the simulated processes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Silent(EventLog):
    """Counts events, and keeps none."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def emit(self, event: str, /, **fields: Any) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1

    @contextlib.contextmanager
    def span(self, event: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        self.emit(event)
        yield {}

    def close(self) -> None:
        return None


Frames = list[memoryview]


@dataclass
class _Line:
    """One peer's connection: what is on its way in either direction."""

    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)


class Wire:
    """The service's end, as `Router`, for as long as one service lives; the lines outlive it."""

    refused = cut = 0
    address = "tcp://127.0.0.1:1"

    def __init__(self, lines: dict[bytes, _Line], chance: random.Random) -> None:
        self._lines = lines
        self._chance = chance
        self._numbers: dict[bytes, _Numbers] = {}

    def receive(self, timeout: float) -> Received | None:
        """Of any peer that has said something: what the others say meanwhile overtakes it."""
        peers = [peer for peer, line in self._lines.items() if line.up]
        if not peers:
            return None
        peer = self._chance.choice(peers)
        frames = self._lines[peer].up.popleft()
        frames[0], missed = self._numbers.setdefault(peer, _Numbers()).strip(frames[0])
        return Received(peer, frames, missed)

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        header = self._numbers.setdefault(peer, _Numbers()).stamp(encode(message))
        if peer not in self._lines:
            return False
        self._lines[peer].down.append([memoryview(header), *(memoryview(frame) for frame in frames)])
        return True

    def close(self) -> None:
        return None


class Ends:
    """Where peers connect, instead of `Dealer`."""

    def __init__(self, chance: random.Random) -> None:
        self.lines: dict[bytes, _Line] = {}
        self.lost = 0
        self._chance = chance
        self._count = 0

    def __call__(
        self, address: str, stream: Any, keys: Path | None = None, name: str = "peer", *, on_loop: bool = False
    ) -> End:
        self._count += 1
        identity = f"{name}:{self._count}".encode()
        line = self.lines[identity] = _Line()
        return End(identity, line, self.lines)

    def breaks(self) -> None:
        """A connection is cut and made again: a run of words under way is lost, in both directions."""
        if not self.lines:
            return
        line = self._chance.choice(list(self.lines.values()))
        for way in (line.up, line.down):
            for _ in range(self._chance.randint(0, len(way))):
                way.pop()  # what was sent last was not through yet
                self.lost += 1


class End:
    """A peer's end of its line, as `Dealer`."""

    def __init__(self, identity: bytes, line: _Line, lines: dict[bytes, _Line]) -> None:
        self.identity = identity
        self.missed = 0
        self._line = line
        self._lines = lines
        self._numbers = _Numbers()

    def send(self, word: Message | Group) -> None:
        header, *arena = encode_group(word, 1 << 20) if isinstance(word, Group) else (encode(word),)
        self._line.up.append([memoryview(self._numbers.stamp(header)), *arena])

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        if not self._line.down:
            return None
        first, *frames = self._line.down.popleft()
        header, missed = self._numbers.strip(first)
        self.missed += missed
        message = decode(header)
        if isinstance(message, BatchHeader):
            return ReceivedBatch(decode_batch(message, frames), _stats(message), message.ledger)
        return message

    def close(self) -> None:
        """What it sent is still received, as `LINGER` has it; nothing can be sent to it."""
        self._line.down.clear()
        if not self._line.up:
            self._lines.pop(self.identity, None)
        else:
            gone = _Line(up=self._line.up)
            self._lines[self.identity] = gone

    def vanish(self) -> None:
        """The process was killed."""
        self._lines.pop(self.identity, None)


def _stats(header: BatchHeader) -> dict[str, Any]:
    return {name: getattr(header.stats, name) for name in header.stats.__struct_fields__}


@dataclass(frozen=True)
class Checkpoint:
    """What survives a learner."""

    step: int = 0
    ledger: Ledger | None = None


class World:
    """What the roles share: time, chance, the network, what survives, and what is counted."""

    def __init__(self, chance: random.Random, run: str) -> None:
        self.chance = chance
        self.run = run
        self.time = Time()
        self.ends = Ends(chance)
        self.counts: dict[str, int] = {}
        self.events = Silent({})
        self.faulty = True
        self.failing = 0.2  # share of publishes
        self.incarnations = 0
        self.checkpoint_every = 3
        self.checkpoints: list[Checkpoint] = [Checkpoint()]
        self.trains: Callable[[Batch], None] = lambda batch: None

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
