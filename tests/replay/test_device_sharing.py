"""Learner and servers take turns on the same devices: who has them when, whatever comes, goes or answers late."""

from __future__ import annotations

from pathlib import Path

import pytest
from driven_core import LEARNER, PUBLISHER, SERVER, WORKER, Driven, answer, issued
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from service_parts import RUN, V0, V1, MakeGroup

from streamrl.replay.device_sharing import DeviceSharing, Owner
from streamrl.replay.workers import Worker
from streamrl.stream.messages import (
    Announce,
    Applied,
    Asleep,
    BatchHeader,
    Credit,
    Finished,
    Hello,
    Message,
    Next,
    Progress,
    ServerState,
    Sleep,
    Wake,
)
from streamrl.types import PolicyVersion
from tests.operations_table import documented

OTHER = b"w2:1"


class Turns(RuleBasedStateMachine):
    """Workers obey orders in their own time; the learner may have the devices only while no live one is awake."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing = DeviceSharing()
        self.workers: dict[str, Worker] = {}
        self.awake: dict[str, bool] = {}  # what each worker's servers really do
        self.read: dict[str, Sleep | Wake] = {}  # the order that it has read last
        self.has_devices = False

    @rule(name=st.sampled_from("ab"))
    def a_worker_comes_with_its_servers_awake(self, name: str) -> None:
        self.workers[name], self.awake[name] = Worker(name, name.encode(), 0.0, {}), True

    @rule(name=st.sampled_from("ab"))
    def a_worker_goes(self, name: str) -> None:
        self.workers.pop(name, None)
        self.awake.pop(name, None)
        self.read.pop(name, None)

    @rule(name=st.sampled_from("ab"))
    def a_worker_reads_its_order(self, name: str) -> None:
        if name in self.workers:
            self.read[name] = self.sharing.word

    @rule(name=st.sampled_from("ab"))
    def a_worker_has_followed_it_and_answers(self, name: str) -> None:
        order = self.read.get(name)
        if order is None:
            return
        self.awake[name] = isinstance(order, Wake)
        if isinstance(order, Sleep):
            self.workers[name].asleep = order.number

    @rule(name=st.sampled_from("ab"))
    def a_worker_obeys_at_once(self, name: str) -> None:
        self.a_worker_reads_its_order(name)
        self.a_worker_has_followed_it_and_answers(name)

    @rule()
    def the_learner_waits_for_groups(self) -> None:
        self.has_devices = False
        self.sharing.lend()

    @rule()
    def its_batch_is_complete(self) -> None:
        before = dict(self.awake)
        had_them = self.has_devices or self.sharing.owner is Owner.LEARNER
        self.has_devices = self.sharing.claim(self.workers.values())
        if self.has_devices and not had_them:
            assert not any(before.values()), "a server is awake as the learner begins"

    @invariant()
    def servers_wake_only_in_their_turn(self) -> None:
        if self.has_devices:
            assert isinstance(self.sharing.word, Sleep)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=300)


@pytest.fixture
def shared(tmp_path: Path) -> Driven:
    """A learner, a publisher and a worker, as in test_core.py, that share their devices."""
    driven = Driven(tmp_path, run={"placement": "shared"})
    driven.send(LEARNER, Hello(run=RUN, role="learner", name="learner-0", version=V0))
    driven.send(PUBLISHER, Hello(run=RUN, role="publisher", name="publisher-0", version=V0))
    join(driven, WORKER, "w", SERVER)
    return driven


def join(driven: Driven, identity: bytes, name: str, server: ServerState, capacity: int = 99) -> None:
    driven.send(identity, Hello(run=RUN, role="generator", name=name, servers=(server,)), Credit(capacity=capacity))


def orders(messages: list[Message]) -> list[Sleep | Wake]:
    return [message for message in messages if isinstance(message, Sleep | Wake)]


def has_batch(driven: Driven) -> bool:
    return any(isinstance(message, BatchHeader) for message in driven.got(LEARNER))


def test_the_learner_gets_its_batch_once_every_server_sleeps(shared: Driven, make_group: MakeGroup) -> None:
    join(shared, OTHER, "w2", ServerState(name="s2", version=V0), capacity=0)
    assert orders(shared.got(OTHER)) == [Sleep(number=0)], "nobody has asked for a batch yet"
    tickets = issued(shared)
    shared.send(LEARNER, Next(step=0))
    assert orders(shared.got(WORKER)) == orders(shared.got(OTHER)) == [Wake(number=1)]
    answer(shared, make_group, tickets)
    assert orders(shared.got(WORKER)) == orders(shared.got(OTHER)) == [Sleep(number=2)]
    shared.send(WORKER, Asleep(number=2))
    shared.send(OTHER, Asleep(number=0))
    assert not has_batch(shared), "an answer to a former order"
    shared.send(OTHER, Asleep(number=2))
    assert has_batch(shared)
    assert [event["owner"] for event in shared.events_of("devices")] == ["servers", "handover", "learner"]


def test_a_batch_that_is_there_already_costs_no_turn(shared: Driven, make_group: MakeGroup) -> None:
    tickets = issued(shared)
    answer(shared, make_group, tickets)  # four slots, two steps: some servers had drawn before they read the order
    for step in range(2):
        shared.send(LEARNER, Next(step=step))
        assert has_batch(shared)
        shared.send(LEARNER, Progress(version=PolicyVersion(step + 1)))
    assert orders(shared.got(WORKER)) == []
    shared.send(LEARNER, Next(step=2))
    assert orders(shared.got(WORKER)) == [Wake(number=1)]


def test_a_worker_that_comes_in_the_handover_is_waited_for_and_one_that_is_silent_is_not(
    shared: Driven, make_group: MakeGroup
) -> None:
    shared.send(LEARNER, Next(step=0))
    answer(shared, make_group, issued(shared))
    join(shared, OTHER, "w2", ServerState(name="s2", version=V0), capacity=0)
    shared.send(WORKER, Asleep(number=2))
    assert not has_batch(shared)
    for _ in range(12):  # heartbeats of one second
        shared.tick(1.0)
    assert has_batch(shared), "both are silent, and nobody waits for them"


def test_a_worker_that_says_hello_again_is_sent_the_present_order(shared: Driven) -> None:
    shared.send(LEARNER, Next(step=0))
    assert orders(shared.got(WORKER)) == [Sleep(number=0), Wake(number=1)]
    shared.tick(1.0)
    assert orders(shared.got(WORKER)) == []
    join(shared, WORKER, "w", SERVER)
    assert orders(shared.got(WORKER)) == [Wake(number=1)]


def test_a_service_that_was_started_again_leaves_the_devices_to_the_learner(tmp_path: Path, shared: Driven) -> None:
    shared.send(LEARNER, Next(step=0))
    again = Driven(tmp_path, run={"placement": "shared"})
    join(again, WORKER, "w", SERVER)
    assert orders(again.got(WORKER)) == [Sleep(number=0)], "it may be at its step"
    again.send(LEARNER, Hello(run=RUN, role="learner", name="learner-0", version=V0), Next(step=0))
    assert orders(again.got(WORKER)) == [Wake(number=1)]


def test_a_server_that_is_being_evaluated_answers_to_the_end(shared: Driven, make_group: MakeGroup) -> None:
    shared.send(PUBLISHER, Announce(version=V1))
    shared.send(WORKER, Applied(server="s", version=V1, pinned=True))
    tickets = issued(shared)
    shared.send(LEARNER, Next(step=0))
    answer(shared, make_group, tickets)
    assert orders(shared.got(WORKER)) == [Wake(number=1)]
    shared.send(WORKER, Applied(server="s", version=V1, pinned=False))
    assert orders(shared.got(WORKER)) == [Sleep(number=2)]


def test_the_servers_wake_for_the_end_of_the_run(shared: Driven) -> None:
    shared.send(LEARNER, Finished(version=PolicyVersion(3)))
    assert orders(shared.got(WORKER)) == [Sleep(number=0), Wake(number=1)]


def test_a_run_whose_servers_do_not_fall_asleep_says_so(shared: Driven, make_group: MakeGroup) -> None:
    shared.send(LEARNER, Next(step=0))
    answer(shared, make_group, issued(shared))
    for _ in range(4000):
        if shared.core.is_over():
            break
        join(shared, WORKER, "w", SERVER)
        shared.tick(1.0)
    documented(
        "no learner step in run.progress_timeout=... s: the servers of ... generator workers do not fall asleep",
        shared.events_of("gave_up")[0]["reason"],
        shared.core.code,
    )


def test_a_learner_that_begins_again_in_the_handover_gets_what_it_lacks_from_servers_that_wake(
    shared: Driven, make_group: MakeGroup
) -> None:
    """Its batch is there no more: the journal keeps none, and the step is generated again."""
    tickets = issued(shared)
    shared.send(LEARNER, Next(step=0))
    answer(shared, make_group, tickets[:2])
    shared.send(WORKER, Asleep(number=orders(shared.got(WORKER))[-1].number))
    assert has_batch(shared)
    shared.send(LEARNER, Progress(version=V1))
    shared.send(PUBLISHER, Announce(version=V1))
    shared.send(WORKER, Applied(server="s", version=V1))
    shared.send(LEARNER, Next(step=1))
    answer(shared, make_group, tickets[2:])
    asked = orders(shared.got(WORKER))[-1]
    assert isinstance(asked, Sleep)
    shared.send(LEARNER, Hello(run=RUN, role="learner", name="learner-0", version=PolicyVersion(0, 1)), Next(step=0))
    shared.send(WORKER, Asleep(number=asked.number))
    assert isinstance(orders(shared.got(WORKER))[-1], Wake)
