"""Two runs on one address, a journal of another run, a ledger that cannot be: refused in one line, and served on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from service_parts import RUN, V0, V1, WAIT, MakeGroup, Running, answer, ids, make_config, receive, receive_tickets

from streamrl.config import Config
from streamrl.learner.batches import ServiceBatches
from streamrl.observe.events import EventLog
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.history import read_journal, recorded_batches
from streamrl.replay.records import Record, Snapshot
from streamrl.replay.segments import MAGIC, JournalDamaged, Opening, encode_record
from streamrl.replay.service import Service
from streamrl.stream.identity import AnotherRun, run_identity
from streamrl.stream.messages import Accepted, Credit, Hello, Introduce, Next, ServerState, Stop, Welcome
from streamrl.stream.session import PeerRefused
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Ledger, PolicyVersion
from tests.operations_table import documented

OTHER = "another-run"
SERVER = ServerState(name="s", version=V0)


@pytest.mark.parametrize(
    "hello",
    [
        Hello(run=OTHER, role="generator", name="w", servers=(SERVER,)),
        Hello(run=OTHER, role="learner", name="learner-0", version=V1),
        Hello(run=OTHER, role="publisher", name="publisher", version=V1),
    ],
    ids=lambda hello: hello.role,
)
def test_a_peer_of_another_run_is_refused_with_both_ids_and_replaces_nobody(
    hello: Hello, start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    learner, worker = running.learner(), running.worker()
    tickets = receive_tickets(worker, 4)
    stranger = running.peer(hello)
    stop = receive(stranger, Stop)
    assert stop.refused
    assert stop.reason.startswith(f"{hello.name} is of run {OTHER}, and run {RUN} is served at this address; allowed:")
    assert [event["run"] for event in running.events_of("replay.refused")] == [OTHER]
    for ticket in tickets[:2]:
        assert isinstance(answer(worker, make_group, ticket), Accepted)
    learner.send(Next(step=0))
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]


def test_a_group_of_another_runs_worker_is_never_taken(start: Callable[..., Running], make_group: MakeGroup) -> None:
    running = start()
    running.learner(), running.worker()
    stranger = Dealer(running.service.address, running.config.stream, name="w")
    running.peers.append(stranger)
    stranger.send(make_group(0))  # as of a ticket that its own service gave it, at this address, before
    receive(stranger, Introduce)
    stranger.send(Hello(run=OTHER, role="generator", name="w", servers=(SERVER,), tickets=((0, 0),)))
    stranger.send(Credit(capacity=9))
    stranger.send(make_group(0))
    assert receive(stranger, Stop).refused
    assert running.events_of("group.accepted") == running.events_of("worker.replaced") == []


def test_the_learners_own_line_ends_with_the_services_words(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start()
    (tmp_path / "other").mkdir()
    shutil.copy(running.folder / "replay.address", tmp_path / "other")
    config = running.config.model_copy(update={"run": running.config.run.model_copy(update={"id": OTHER})})
    source = ServiceBatches(config, tmp_path / "other", V0)
    try:
        with pytest.raises(PeerRefused, match=f"learner-0 is of run {OTHER}, and run {RUN} is served"):
            source.begun(WAIT)
    finally:
        source.close()
    assert running.events_of("learner.progress") == []


def test_every_opening_and_every_ledger_names_the_run(start: Callable[..., Running], make_group: MakeGroup) -> None:
    running = start()
    learner, worker = running.learner(), running.worker()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    learner.send(Next(step=0))
    assert receive(learner, ReceivedBatch).ledger.run == RUN
    running.close()
    running = start()
    entries = list(read_journal(running.folder / "journal"))
    openings = [(entry.place.segment, entry.record) for entry in entries if isinstance(entry.record, Opening)]
    assert len(openings) == 2
    assert all((opening.segment, opening.run) == (number, RUN) for number, opening in openings)


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl", "replay-0")


def with_run(config: Config, run: str | None) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run})})


def test_the_journal_of_another_run_is_refused_before_anything_is_served(tmp_path: Path, events: EventLog) -> None:
    for name in ("a", "b"):
        DurableBuffer(with_run(make_config(), name), tmp_path / name, events).close()
    shutil.rmtree(tmp_path / "a" / "journal")
    shutil.copytree(tmp_path / "b" / "journal", tmp_path / "a" / "journal")
    with pytest.raises(
        AnotherRun, match=r"000000.journal is of run b, and its run folder is of run a; allowed"
    ) as refused:
        Service(with_run(make_config(), None), tmp_path / "a", events)
    documented("... is of run ..., and its run folder is of run ...; allowed...", str(refused.value), 2)
    assert not (tmp_path / "a" / "replay.address").exists()
    assert [path.name for path in (tmp_path / "a" / "journal").iterdir()] == ["000000.journal"]


def test_one_segment_of_another_run_among_its_own_is_refused(tmp_path: Path, events: EventLog) -> None:
    for name in ("a", "b"):
        for _ in range(3):
            DurableBuffer(with_run(make_config(), name), tmp_path / name, events).close()
    shutil.copy(tmp_path / "b" / "journal" / "000001.journal", tmp_path / "a" / "journal")
    with pytest.raises(AnotherRun, match=r"000001.journal is of run b"):
        DurableBuffer(make_config(run={"id": "a"}), tmp_path / "a", events)
    with pytest.raises(AnotherRun, match="has segments of the runs a, b; allowed: of one"):  # retrain, audit
        next(recorded_batches(tmp_path / "a" / "journal"))


class FormerOpening(Record, frozen=True, kw_only=True, tag="Opening"):
    """As it was written before segments named themselves and their run."""

    time: float


def test_a_journal_from_before_the_id_is_served_in_the_folder_that_is_adopted_and_in_no_other(
    tmp_path: Path, events: EventLog
) -> None:
    config = with_run(make_config(), None)
    snapshot = msgspec.msgpack.encode(Snapshot(next_id=2, next_step=1, cursors={"copy": 2}))
    former = b"".join([MAGIC, *encode_record(FormerOpening(time=1.0), (snapshot, b""))])
    for name in ("old", "new"):
        (tmp_path / name / "journal").mkdir(parents=True)
        (tmp_path / name / "journal" / "000000.journal").write_bytes(former)
    (tmp_path / "old" / "config.yaml").write_text("")
    for _ in range(2):
        durable = DurableBuffer(config, tmp_path / "old", events)
        assert durable.buffer.next_step == 1
        durable.close()
    assert run_identity(tmp_path / "old").adopted
    with pytest.raises(AnotherRun, match="is of a run without an id"):
        DurableBuffer(config, tmp_path / "new", events)


def test_a_snapshot_that_another_version_wrote_is_one_line(tmp_path: Path, events: EventLog) -> None:
    journal = tmp_path / "run" / "journal"
    journal.mkdir(parents=True)
    written = [MAGIC, *encode_record(Opening(time=1.0, segment=0, run=RUN), (b"what was", b""))]
    (journal / "000000.journal").write_bytes(b"".join(written))
    with pytest.raises(JournalDamaged, match=r"journal: its snapshot is of another version of streamrl: "):
        DurableBuffer(make_config(), tmp_path / "run", events)


HUGE = 2**62


@pytest.mark.parametrize(
    ("ledger", "problem"),
    [
        (Ledger(above=(HUGE,), run=RUN), f"knows groups up to {HUGE}"),
        (Ledger(below=HUGE, run=RUN), f"knows groups up to {HUGE - 1}"),
        (Ledger(below=2, pending={2: ("copy", 2), HUGE: ("copy", 3)}, run=RUN), f"knows groups up to {HUGE}"),
        (Ledger(below=-1, run=RUN), "knows groups up to -2"),
        (Ledger(below=2, pending={-5: ("copy", 0)}, run=RUN), "knows groups up to 1"),
        (Ledger(below=1, above=(2, 2), pending={1: ("copy", 1)}, run=RUN), "knows groups up to 2"),
        (Ledger(below=2, pending={2: ("chess", 0)}, run=RUN), "names the task chess, which this run does not have"),
        (Ledger(below=2, cursors={"copy": HUGE}, run=RUN), "a prompt index that is out of range"),
        (Ledger(below=2, run=OTHER), f"its ledger is of run {OTHER}, this is run {RUN}"),
    ],
)
def test_a_ledger_that_cannot_be_is_refused_in_one_line_and_the_run_is_served_on(
    ledger: Ledger, problem: str, start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    hello = Hello(run=RUN, role="learner", name="learner-0", version=PolicyVersion(1), ledger=ledger)
    stop = receive(running.peer(hello), Stop)
    assert stop.refused
    documented("learner-0 starts at version ..., but its ledger ...", stop.reason, 2)
    assert problem in stop.reason
    learner = running.learner(PolicyVersion(1), Ledger(below=2, cursors={"copy": 2}, run=RUN))
    assert isinstance(running.welcome, Welcome)
    worker = running.worker(version=V1)
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket, V1)
    learner.send(Next(step=1))
    assert ids(receive(learner, ReceivedBatch)) == [2, 3]
