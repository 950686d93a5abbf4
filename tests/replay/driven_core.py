"""A service's core whose peers are lists in memory, and whose time is a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service_parts import V0, MakeGroup, make_config

from streamrl.observe.events import EventLog, read_events
from streamrl.replay.core import Core
from streamrl.replay.durable import DurableBuffer
from streamrl.stream.codec import decode_batch, encode_group
from streamrl.stream.messages import BatchHeader, Buffer, Message, ServerState, Ticket, Tickets, encode
from streamrl.stream.sockets import Received
from streamrl.types import Batch

WORKER, LEARNER, PUBLISHER = b"w:1", b"learner:1", b"publisher:1"
SERVER = ServerState(name="s", version=V0)


class Driven:
    """A core, and what it has sent to whom."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        self.now = 100.0
        self.sent: dict[bytes, list[tuple[Message, Sequence[Buffer]]]] = defaultdict(list)
        self.events = EventLog(folder / "events" / "replay-0.jsonl", "replay-0")
        config = make_config(journal={"keep": "none"}, **sections)
        self.durable = DurableBuffer(config, folder, self.events, lambda: self.now)
        self.core = Core(config, self.durable, self._send, self.events, self.now)

    def _send(self, peer: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        self.sent[peer].append((message, frames))
        return True

    def send(self, peer: bytes, *messages: Message) -> None:
        """Messages of a peer, and the tick that follows."""
        for message in messages:
            self.core.handle(Received(peer, [memoryview(encode(message))], 0), self.now)
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.core.tick(self.now, emptied=True)

    def got(self, peer: bytes) -> list[Message]:
        """What was sent to a peer since the last call."""
        return [message for message, _ in self.sent.pop(peer, [])]

    def batch(self) -> Batch:
        ((header, frames),) = [each for each in self.sent.pop(LEARNER) if isinstance(each[0], BatchHeader)]
        assert isinstance(header, BatchHeader)
        return decode_batch(header, [memoryview(frame) for frame in frames])

    def events_of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_events(self.events.path) if record["event"] == event]


def issued(driven: Driven) -> list[Ticket]:
    return [ticket for message in driven.got(WORKER) if isinstance(message, Tickets) for ticket in message.tickets]


def answer(driven: Driven, make_group: MakeGroup, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        group = make_group(ticket.group_id, attempt=ticket.attempt, version=ticket.issued_version)
        frames = [memoryview(frame) for frame in encode_group(group, 1 << 20)]
        driven.core.handle(Received(WORKER, frames, 0), driven.now)
    driven.tick()
