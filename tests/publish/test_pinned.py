"""A server that is being evaluated is left out of publishing, and brought up to date when it is free again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.publisher import Publisher
from streamrl.stream.messages import Announce, Applied, Publish, Roster, ServerState
from streamrl.types import PolicyVersion
from tests.scripted_service import ScriptedService

DEADLINE = 60.0
V0, V1, V2 = (PolicyVersion(step) for step in range(3))


class Played:
    """A publisher, and a replay service by hand."""

    def __init__(self, folder: Path, model: Path) -> None:
        publish = {"timeout": DEADLINE, "transport": "disk"}
        config = Config.model_validate({"model": {"path": model}, "publish": publish, "stream": {"curve": "off"}})
        self.service = ScriptedService(folder)
        self.events = EventLog(event_path(folder, "learner"), "learner-0")
        self.publisher = Publisher(config, folder, V0, self.events)
        self.received, self.send = self.service.received, self.service.send

    def expect(self, condition: Callable[[], bool]) -> None:
        self.service.wait_until(condition, DEADLINE)

    def published(self) -> list[tuple[str, PolicyVersion]]:
        return [(message.server, message.version) for message in self.received if isinstance(message, Publish)]

    def close(self) -> None:
        self.publisher.close()
        self.service.close()
        self.events.close()


@pytest.fixture
def played(tmp_path: Path, model_folders: tuple[Path, Path]) -> Iterator[Played]:
    running = Played(tmp_path, model_folders[0])
    yield running
    running.close()


def announced(played: Played, version: PolicyVersion) -> Callable[[], bool]:
    return lambda: Announce(version=version) in played.received


def test_a_pinned_server_is_left_out_until_it_is_free_and_then_gets_the_newest_version(
    played: Played, model_folders: tuple[Path, Path]
) -> None:
    weights = load_file(model_folders[1] / "model.safetensors")
    played.expect(lambda: bool(played.received))
    free, pinned = ServerState(name="free", version=V0), ServerState(name="pinned", version=V0, pinned=True)
    played.send(Roster(servers=(free, pinned)))
    for version in (V1, V2):
        played.publisher.offer(version, weights.items())
        played.expect(lambda version=version: ("free", version) in played.published())
        played.send(Applied(server="free", version=version))
    played.expect(announced(played, V2))
    assert not played.publisher.wait(0.3), "the pinned one does not have it"
    assert {server for server, _ in played.published()} == {"free"}
    played.send(Applied(server="pinned", version=V0))
    played.expect(lambda: ("pinned", V2) in played.published())
    played.send(Applied(server="pinned", version=V2, pinned=True))
    assert played.publisher.wait(DEADLINE)  # pinned to the newest: nothing is left to do
    assert [each for each in played.published() if each[0] == "pinned"] == [("pinned", V2)]


def test_a_server_that_turns_out_to_be_pinned_is_given_up_at_once(
    played: Played, model_folders: tuple[Path, Path]
) -> None:
    weights = load_file(model_folders[1] / "model.safetensors")
    played.expect(lambda: bool(played.received))
    played.send(Roster(servers=(ServerState(name="late", version=V0),)))
    played.publisher.offer(V1, weights.items())
    played.expect(lambda: bool(played.published()))
    played.send(Applied(server="late", version=V0, pinned=True))
    deadline = time.monotonic() + DEADLINE / 2  # of publish.timeout
    while played.publisher.statistics.failed == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(played.published()) == 1
