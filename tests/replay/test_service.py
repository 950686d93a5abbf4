"""The service over real sockets: tickets, groups, batches, notices, losses, malformed peers, every way to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import zmq
from msgspec.structs import replace
from service_parts import (
    RUN,
    V0,
    V1,
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

from streamrl.replay.journal import recorded_batches
from streamrl.replay.service import Service
from streamrl.stream.codec import encode_group
from streamrl.stream.messages import (
    Accepted,
    Announce,
    Applied,
    Bye,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Introduce,
    Measured,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Refused,
    Roster,
    ServerState,
    Stop,
    Tickets,
    Welcome,
    encode,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import PolicyVersion
from tests.operations_table import GOES_ON, documented

FAILING_FSYNC = """
fsync = os.fdatasync
def fdatasync(file):
    if pathlib.Path(sys.argv[2], "now").exists():
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    fsync(file)
import sys
os.fdatasync = fdatasync
"""


def test_a_whole_run_with_two_workers_a_learner_and_a_publisher(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """Three steps of two groups; the groups come in the wrong order, each version is published to both servers."""
    running = start()
    workers = {name: running.worker(name, capacity=2) for name in ("a", "b")}
    learner, publisher = running.learner(), running.publisher()
    version = V0
    for step in range(3):
        learner.send(Next(step=step))
        batch = None
        while batch is None:
            for worker in workers.values():
                while isinstance(message := worker.receive(0.02), Tickets | Accepted):
                    tickets = message.tickets if isinstance(message, Tickets) else ()
                    for ticket in reversed(tickets):
                        worker.send(make_group(ticket.group_id, version=ticket.issued_version, tokens=10))
                assert message is None, message
            batch = learner.receive(0.02)
        assert isinstance(batch, ReceivedBatch)
        assert (batch.batch.step, ids(batch)) == (step, [2 * step, 2 * step + 1])
        version = replace(version, step=step + 1)
        learner.send(Progress(version=version))
        publisher.send(Announce(version=version))
        for name, worker in workers.items():
            publisher.send(Publish(server=f"{name}-server", version=version, manifest={"step": step}))
            while not isinstance(message := worker.receive(WAIT), Publish):
                for ticket in message.tickets if isinstance(message, Tickets) else ():
                    worker.send(make_group(ticket.group_id, version=ticket.issued_version, tokens=10))
            assert (message.version, message.manifest) == (version, {"step": step})
            worker.send(Applied(server=message.server, version=version))
            while not isinstance(publisher.receive(WAIT), Applied):
                pass
    learner.send(Finished(version=version))
    for peer in (*workers.values(), learner, publisher):
        while not isinstance(message := peer.receive(WAIT), Stop):
            assert message is not None
        assert "complete with version 3.0" in message.reason
        peer.send(Bye())
    assert running.end() == 0
    recorded = list(recorded_batches(running.folder / "journal"))
    assert [(batch.step, [group.group_id for group in batch.groups]) for batch in recorded] == [
        (0, [0, 1]),
        (1, [2, 3]),
        (2, [4, 5]),
    ]
    assert [event["tokens"] for event in running.events_of("group.accepted")] == [20] * 6
    assert not (running.folder / "replay.address").exists()


def test_the_learner_and_the_journal_are_told_which_groups_an_earlier_step_had(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(replay={"reuse": 2, "max_staleness": 3}, checkpoint={"keep_every": 1})
    worker, learner = running.worker(), running.learner()
    batches = []
    for step in range(2):
        learner.send(Next(step=step))
        while not isinstance(batch := learner.receive(0.02), ReceivedBatch):
            while isinstance(message := worker.receive(0.02), Tickets | Accepted):
                for ticket in message.tickets if isinstance(message, Tickets) else ():
                    worker.send(make_group(ticket.group_id, version=ticket.issued_version))
        batches.append(batch.batch)
        learner.send(Measured(step=step, ess=(0.9, 0.8)))
        learner.send(Progress(version=PolicyVersion(step + 1)))
    assert [(sorted(batch.reused), [group.group_id for group in batch.fresh]) for batch in batches] == [
        ([], [0, 1]),
        ([0], [2]),
    ]
    running.close()
    assert [batch.reused for batch in recorded_batches(running.folder / "journal")] == [frozenset(), frozenset({0})]


def test_nothing_is_issued_beyond_the_slots_until_a_server_has_the_weights(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    learner.send(Next(step=0))
    received = receive(learner, ReceivedBatch)
    assert (received.stats["tokens_generated"], received.stats["groups"]) == (40, 2)
    assert received.stats["selection"]["selection/trained/groups"] == 2
    assert received.ledger is not None
    assert (received.ledger.below, set(received.ledger.pending)) == (2, {2, 3})
    assert worker.receive(0.3) is None  # consumed, and still charged
    running.announce(V1)
    worker.send(Applied(server="w-server", version=V1))
    assert [(t.group_id, t.issued_version) for t in receive_tickets(worker, 2)] == [(4, V1), (5, V1)]


def test_the_same_step_may_be_asked_for_again_and_a_wrong_one_ends_the_run(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    for _ in range(2):
        learner.send(Next(step=0))
        assert ids(receive(learner, ReceivedBatch)) == [0, 1]
    learner = running.learner()  # after a reconnect
    learner.send(Next(step=0))
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]
    assert len(running.events_of("batch")) == 2  # one for each start of a learner
    learner.send(Next(step=2))
    assert "step 2 was asked for, 1 is next" in receive(learner, Stop).reason
    assert running.end() == 1


def test_a_group_with_bad_content_costs_its_attempt_not_the_service(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker = running.worker(capacity=1)
    running.learner()
    (ticket,) = receive_tickets(worker, 1)
    header, arena = encode_group(make_group(ticket.group_id), 1 << 20)
    worker._send([header, bytes(arena)[:-4]])
    refused = receive(worker, Refused)
    assert (refused.group_id, refused.attempt) == (0, 0)
    assert "arena of 104 bytes, the header asks for 108" in refused.reason
    (again,) = receive_tickets(worker, 1)
    assert (again.group_id, again.attempt) == (0, 1)
    assert isinstance(answer(worker, make_group, again), Accepted)


def test_malformed_messages_are_refused_counted_and_told_once_a_peer(
    start: Callable[..., Running], make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    ticket = receive_tickets(worker, 4)[0]
    junk: list[list[bytes]] = [
        [b"", b"", b""],
        [b"junk"],
        [b"\xdd\xff\xff\xff\xff"],
        [encode(Next(step=0))],  # not a worker's to say
        [encode(Heartbeat())[:-1]],
        [encode(Applied(server="nobody", version=V0))],
        [b"junk", b"junk"],
        [os.urandom(300), os.urandom(300)],
    ]
    for frames in junk:
        worker._send(list(frames))
        learner._send(list(frames))
    stranger = Dealer(running.service.address, running.config.stream, name="stranger")
    stranger._send([b"junk"])
    assert "refused: header" in receive(stranger, Stop).reason
    stranger.close()
    assert isinstance(answer(worker, make_group, ticket), Accepted)
    assert running.service.core.malformed == 2 * len(junk)  # and the stranger's, less the learner's rightful Next
    assert len(running.events_of("replay.malformed")) == 3
    documented("malformed message from ... refused: ...", caplog.text, GOES_ON)


def test_damaged_messages_of_every_kind_leave_the_service_serving(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, fuzzer, learner = running.worker(), running.worker("fuzzer", capacity=0), running.learner()
    tickets = receive_tickets(worker, 4)
    random = Random(7)
    whole = [
        [encode(Heartbeat(tickets=((0, 0),), busy=1.0, generated=3))],
        [encode(Applied(server="fuzzer-server", version=V0))],
        [encode(Credit(capacity=0))],
        list(encode_group(make_group(0), 1 << 20)),
    ]
    for _ in range(400):
        frames = [bytearray(frame) for frame in random.choice(whole)]
        for _ in range(random.randint(1, 5)):
            frame = random.choice(frames)
            frame[random.randrange(len(frame))] = random.randrange(256)
        fuzzer._send([bytes(frame)[: random.choice([None, random.randrange(99)])] for frame in frames])
    for ticket in tickets:
        assert isinstance(answer(worker, make_group, ticket), Accepted)
    learner.send(Next(step=0))
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]
    assert running.service.core.malformed > 100


def test_the_publisher_knows_the_servers_and_learns_what_became_of_its_versions(start: Callable[..., Running]) -> None:
    running = start()
    publisher = running.publisher()
    assert receive(publisher, Roster).servers == ()
    worker = running.worker()
    assert receive(publisher, Roster).servers == (ServerState(name="w-server", version=V0),)
    publisher.send(Announce(version=V1))
    publisher.send(Publish(server="w-server", version=V1, manifest={"n": [1]}))
    assert receive(worker, Publish).manifest == {"n": [1]}
    worker.send(PublishFailed(server="w-server", version=V1, reason="no memory"))
    assert receive(publisher, PublishFailed).reason == "no memory"
    running.learner()
    assert worker.receive(0.3) is None  # no tickets for a server in an unknown state
    worker.send(Applied(server="w-server", version=V1))
    assert receive(publisher, Applied).version == V1
    assert receive(publisher, Roster).servers == (ServerState(name="w-server", version=V1),)
    assert receive_tickets(worker, 4)[0].issued_version == V0
    publisher.send(Publish(server="gone", version=V1, manifest={}))
    assert receive(publisher, PublishFailed).reason == "no live worker owns this server"
    worker.send(Bye())
    assert receive(publisher, Roster).servers == ()


def test_a_strangers_words_are_answered_by_one_introduce_and_its_hello_counts(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    running.learner()
    stranger = Dealer(running.service.address, running.config.stream, name="w")
    running.peers.append(stranger)
    for _ in range(20):
        stranger.send(Heartbeat())
    stranger.send(make_group(0))
    receive(stranger, Introduce)
    stranger.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),)))
    stranger.send(Credit(capacity=1))
    (ticket,) = receive_tickets(stranger, 1)
    assert isinstance(answer(stranger, make_group, ticket), Accepted)
    assert running.service.core.malformed == 0


def test_a_run_without_a_journal_goes_on_from_the_checkpoints_version(start: Callable[..., Running]) -> None:
    running = start(run={"steps": 30}, journal={"keep": "none"})
    worker = running.worker(version=PolicyVersion(25))  # a server that outlived the learner
    running.learner(PolicyVersion(20, incarnation=1))
    assert running.welcome.published == PolicyVersion(25)
    tickets = receive_tickets(worker, 4)
    assert [t.group_id for t in tickets] == [40, 41, 42, 43]
    assert {t.issued_version.step for t in tickets} <= {19, 20}
    assert not list((running.folder / "journal").glob("*"))


def test_the_end_waits_for_the_last_version_but_not_for_ever(start: Callable[..., Running]) -> None:
    running = start(publish={"timeout": 0.5}, run={"stop_timeout": 0.5})
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    learner.send(Finished(version=PolicyVersion(3)))
    assert "complete" in receive(worker, Stop).reason  # after publish.timeout; it never applied version 3
    assert "complete" in receive(learner, Stop).reason
    assert running.end() == 0  # after run.stop_timeout; it never said Bye


def test_the_role_ends_cleanly_on_sigterm(start_process: Callable[..., ServiceProcess]) -> None:
    service = start_process()
    learner = Dealer(service.address, service.config.stream, name="learner-0")
    learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
    worker = Dealer(service.address, service.config.stream, name="w")
    worker.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),)))
    worker.send(Credit(capacity=1))
    receive_tickets(worker, 1)
    receive(learner, Welcome)
    service.process.send_signal(signal.SIGTERM)
    for peer in (learner, worker):
        assert "ended by SIGTERM" in receive(peer, Stop).reason
        peer.close()
    assert service.process.wait(WAIT) == 0
    assert not (service.folder / "replay.address").exists()


def test_a_version_that_was_never_announced_is_refused_and_frees_nothing(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 9})
    worker, learner = running.worker(), running.learner()
    running.announce(V1)
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    for step in range(2):
        learner.send(Next(step=step))
        receive(learner, ReceivedBatch)
    for version in (PolicyVersion(7), PolicyVersion(1, incarnation=9), PolicyVersion(0, incarnation=1)):
        worker.send(Applied(server="w-server", version=version))
        assert worker.receive(0.3) is None, "slots of a version that nobody has"
    (told,) = running.events_of("replay.malformed")
    assert told["reason"] == "version 7.0, which server w-server reports, was never announced"
    documented("version ..., which server ... reports, was never announced", told["reason"], GOES_ON)
    assert running.service.core.malformed == 3
    worker.send(Applied(server="w-server", version=V1))
    assert [ticket.group_id for ticket in receive_tickets(worker, 2)] == [4, 5]
    learner = running.learner(PolicyVersion(2, incarnation=1))
    assert running.welcome.published == V1


def test_an_address_in_use_ends_the_role_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        config = make_config(replay={"address": f"tcp://127.0.0.1:{thief.getsockname()[1]}"})
        command = [sys.executable, "-c", ServiceProcess.SCRIPT, config.model_dump_json(), str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    documented(
        "replay.address ...: Address already in use ...; allowed: an address of this machine with a free port ...",
        ended.stderr,
        ended.returncode,
    )
    assert f"replay.address {config.replay.address}: Address already in use" in ended.stderr
    assert "allowed: an address of this machine with a free port" in ended.stderr


def test_a_disk_that_fails_ends_the_role_with_one_line_and_the_next_goes_on_from_what_is_on_it(
    start_process: Callable[..., ServiceProcess], make_group: MakeGroup
) -> None:
    """EIO at an fsync cannot be provoked; what the kernel would say is said in its place."""
    failing = "import errno, os, pathlib\n" + FAILING_FSYNC
    service = start_process()
    service.kill()
    config, folder = service.config, service.folder
    command = [sys.executable, "-c", failing + ServiceProcess.SCRIPT, config.model_dump_json(), str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    worker = Dealer(service.address, config.stream, name="w")
    learner = Dealer(service.address, config.stream, name="learner-0")
    try:
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        worker.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="w-server", version=V0),)))
        worker.send(Credit(capacity=4))
        tickets = receive_tickets(worker, 4)
        assert isinstance(answer(worker, make_group, tickets[0]), Accepted)
        (folder / "now").touch()
        worker.send(make_group(1))
        _, told = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        worker.close()
        learner.close()
    assert process.returncode == 1
    (line,) = [line for line in told.splitlines() if "malformed" not in line]
    documented(
        "the journal cannot be written: Input/output error; check the disk, what is committed is safe...",
        line,
        process.returncode,
    )
    assert "the journal cannot be written: Input/output error; check the disk, what is committed is safe" in line
    service.start()
    (recovered,) = service.events_of("journal.recovered")[-1:]
    assert recovered["step"] == 0
    assert not service.events_of("journal.damage")


def test_an_address_in_use_is_told_before_anything_is_started(start: Callable[..., Running]) -> None:
    running = start()
    config = make_config(replay={"address": running.service.address})
    with pytest.raises(zmq.ZMQError, match=r"replay\.address tcp://127\.0\.0\.1:\d+: Address already in use"):
        Service(config, running.folder, running.events)
