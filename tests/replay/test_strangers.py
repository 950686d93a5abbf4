"""A service whose port anybody reaches: connections without a key, and a process that may open no file."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from service_parts import (
    RUN,
    V0,
    WAIT,
    MakeGroup,
    Running,
    ServiceProcess,
    answer,
    ids,
    make_config,
    receive,
    receive_tickets,
)

from streamrl.config.replay import JournalConfig
from streamrl.replay.buffer import Stored
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.journal import Journal, JournalFull
from streamrl.replay.records import Completed, Consumed
from streamrl.replay.segments import segments
from streamrl.stream.address import replay_address
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import Credit, Hello, Next, ServerState, Welcome
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Group
from tests.operations_table import GOES_ON, documented

FRAMES = (b"header", b"arena" * 20)
COMPLETED = Completed(group_id=7, attempt=0, size=106, tokens=10, oldest=0)


class SmallService(ServiceProcess):
    """One that may have 256 descriptors."""

    SCRIPT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 256));" + ServiceProcess.SCRIPT

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, JournalConfig(commit_seconds=1000.0), b"snapshot 0")
    yield journal
    journal.close()


def test_a_segment_is_begun_and_read_where_no_descriptor_is_left(
    journal: Journal, tmp_path: Path, exhaust: Callable[[], None]
) -> None:
    place = journal.append_group(COMPLETED, FRAMES)
    exhaust()
    journal.roll(b"snapshot 1")
    assert journal.load(place, (7, 0)) == FRAMES
    assert journal.compact(None) == []  # the segment in use and the one before it stay
    assert (tmp_path / "000001.journal").exists()


def test_without_a_reserve_either_the_journal_waits_as_it_does_on_a_full_disk(
    journal: Journal, tmp_path: Path, exhaust: Callable[[], None]
) -> None:
    place = journal.append_group(COMPLETED, FRAMES)
    journal._reserve.close()
    exhaust()
    with pytest.raises(JournalFull, match=r"000001\.journal") as full:
        journal.roll(b"snapshot 1")
    with pytest.raises(JournalFull, match="cannot open a file"):
        journal.load(place, (7, 0))
    with pytest.raises(JournalFull, match="cannot open a file"):
        journal.compact(None)
    journal.append(Consumed(step=0, group_ids=(7,)))
    journal.commit()  # the segment that it has is open
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the page itself
    documented("the journal cannot open a file: Too many open files...", str(full.value), GOES_ON)


def test_a_batch_waits_for_a_descriptor(
    start: Callable[..., Running],
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, and the batch a second later: the learner is not told, and nothing is generated again."""
    running = start()
    load, fails = DurableBuffer._frames, [1, 1]

    def spent(self: DurableBuffer, stored: Stored) -> object:
        if fails:
            fails.pop()
            raise JournalFull(24, "the journal cannot open a file: Too many open files", "000000.journal")
        return load(self, stored)

    monkeypatch.setattr("streamrl.replay.durable.DurableBuffer._frames", spent)
    monkeypatch.setattr("streamrl.replay.delivery.RETRY", 0.1)
    learner, worker = running.learner(), running.worker()
    for ticket in receive_tickets(worker, 4)[:2]:
        answer(worker, make_group, ticket)
    learner.send(Next(step=0))
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]
    assert fails == []
    lines = [record.getMessage() for record in caplog.records if "cannot open a file" in record.getMessage()]
    assert len(lines) == 1
    documented("the journal cannot open a file: ...; the batch of step ... waits until one can", lines[0], GOES_ON)
    assert lines[0].endswith("the batch of step 0 waits until one can")


def test_strangers_who_only_connect_neither_end_the_service_nor_hold_up_its_peers(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    """More connections than descriptors, while groups come in, segments are begun and a new peer joins."""
    config = make_config(journal={"keep": "all", "segment": 4096}, stream={"curve": "on"}, run={"steps": 10})
    service = SmallService(config, tmp_path)
    host, port = service.address.removeprefix("tcp://").split(":")
    strangers: list[socket.socket] = []
    keys = key_folder(config, tmp_path)
    learner = Dealer(service.address, config.stream, keys, "learner-0")
    worker = Dealer(service.address, config.stream, keys, "w")

    def large(*arguments: int, **keywords: object) -> Group:
        return make_group(*arguments, tokens=300, **keywords)

    def flood() -> None:
        for _ in range(300):
            with suppress(OSError):
                strangers.append(socket.create_connection((host, int(port)), timeout=WAIT))

    try:
        assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE) == (256, 256)
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        receive(learner, Welcome)
        server = ServerState(name="s", version=V0)
        worker.send(Hello(run=RUN, role="generator", name="w", servers=(server,)))
        worker.send(Credit(capacity=99))
        tickets = receive_tickets(worker, 4)
        before = len(segments(tmp_path / "journal"))
        for ticket in tickets[:2]:
            flood()
            answer(worker, large, ticket)
        late = Dealer(service.address, config.stream, keys, "late")
        late.send(Hello(run=RUN, role="generator", name="late"))
        deadline = time.monotonic() + WAIT
        while not any(event["name"] == "late" for event in service.events_of("replay.hello")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        late.close()
        learner.send(Next(step=0))
        assert ids(receive(learner, ReceivedBatch)) == [0, 1]
        assert len(segments(tmp_path / "journal")) > before
        for stranger in strangers:
            stranger.close()
        deadline = time.monotonic() + WAIT
        while service.descriptors > 64:  # the flood has ended: so has what it cost
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer(worker, large, tickets[2])
        assert service.process.poll() is None
    finally:
        for peer in (learner, worker):
            peer.close()
        service.kill()


FAILING_DOOR = """
from streamrl.stream.door import Door
def fails(self): raise RuntimeError("counts that cannot be")
Door._poll = fails
"""


def test_a_door_that_fails_ends_the_service_with_one_line(tmp_path: Path) -> None:
    """Unguarded, or waiting for a thread that is gone, it would serve nobody or everybody. The failure is put there."""
    config = make_config(stream={"curve": "on"})
    command = [sys.executable, "-c", FAILING_DOOR + ServiceProcess.SCRIPT, config.model_dump_json(), str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        host, port = replay_address(config, tmp_path).removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT):
            _, told = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert told.count("\n") == 1
    documented("nobody bounds any more what connections cost: ...", told, process.returncode)
    assert "counts that cannot be" in told
