"""What a worker does with the versions that the publisher sends it: a server loads each of them once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from streamrl.generate.concurrency import Updates
from streamrl.generate.worker import Worker
from streamrl.observe.events import EventLog
from streamrl.publish.transport import Sink
from streamrl.stream.messages import Applied, Publish, ServerState
from streamrl.types import PolicyVersion

V0, V1 = PolicyVersion(0), PolicyVersion(1)


class Counting(Sink):
    """It keeps which versions it applied."""

    def __init__(self) -> None:
        self.applied: list[PolicyVersion] = []
        self.is_whole = True

    @property
    def whole(self) -> bool:
        return self.is_whole

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        self.applied.append(version)
        self.is_whole = True


def apply(versions: list[PolicyVersion], sink: Sink, folder: Path) -> list[object]:
    """The answers of a worker with one server to these versions, one after the other."""
    served = SimpleNamespace(version=V0, state=ServerState(name="s", version=V0))
    worker = object.__new__(Worker)
    worker._link = SimpleNamespace(tickets={})
    worker._pinning = SimpleNamespace(check=lambda state: None, begin=lambda server, version: False)
    worker._updates = Updates()
    worker._events = EventLog(folder / "generator-0.jsonl", "generator-0")
    worker._fleet = SimpleNamespace(
        servers={"s": served}, set_version=lambda served, version: setattr(served, "version", version)
    )

    async def answers() -> list[object]:
        return [
            await worker._apply(Publish(server="s", version=version, manifest={}, attempt=attempt), served, sink)
            for attempt, version in enumerate(versions)
        ]

    try:
        return asyncio.run(answers())
    finally:
        worker._events.close()


def test_a_version_that_comes_again_is_not_loaded_again(tmp_path):
    sink = Counting()
    assert apply([V1, V1, V0], sink, tmp_path) == [Applied(server="s", version=V1)] * 3
    assert sink.applied == [V1]


def test_a_server_with_parts_of_two_versions_loads_the_one_that_it_had_again(tmp_path):
    sink = Counting()
    sink.is_whole = False
    assert apply([V0], sink, tmp_path) == [Applied(server="s", version=V0)]
    assert sink.applied == [V0]
