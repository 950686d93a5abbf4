"""Evaluations at the service: figures reach one row, waits are timed, pinned servers are known, the end waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from service_parts import (
    RUN,
    V0,
    V1,
    WAIT,
    MakeGroup,
    Running,
    ServiceProcess,
    answer,
    receive,
    receive_tickets,
)

from streamrl.config import evaluate as config_evaluate
from streamrl.observe.events import read_events
from streamrl.replay.evaluations import Evaluations
from streamrl.stream.messages import (
    Applied,
    Bye,
    Credit,
    Evaluated,
    Finished,
    Hello,
    Next,
    Progress,
    Roster,
    ServerState,
    Stop,
    Welcome,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import PolicyVersion

V20 = PolicyVersion(20)
HALF, ALL = (Evaluated(version=V20, metrics={"eval/copy/pass@1": rate}) for rate in (0.5, 1.0))


class Log:
    """Evaluations, and the events that a service writes of them."""

    def __init__(self) -> None:
        self.evaluations, self.events = Evaluations(), list[dict[str, Any]]()

    def again(self) -> Log:
        """Those of a service that begins with what this one has written."""
        log = Log()
        log.events = json.loads(json.dumps(self.events))
        log.evaluations.recover(log.events)
        return log

    def evaluated(self, message: Evaluated) -> None:
        number = self.evaluations.record(message)
        told = {"number": number, "version": str(message.version), "metrics": message.metrics}
        self.events.append({"event": "evaluated", **told})

    def batch(self, step: int, *, again: bool = False, now: float = 0.0) -> dict[str, float]:
        metrics = self.evaluations.metrics(step, now, again=again)
        self.events.append({"event": "batch", "step": step, **self.evaluations.fields(step)})
        return metrics

    def rest(self, *, received: int) -> list[Evaluated]:
        """What the learner is told at the end, of which it receives so many."""
        rest = self.evaluations.rest()
        self.events.append({"event": "evaluated.late", "numbers": [*rest][:received]})
        return [*rest.values()]


def servers(*states: tuple[PolicyVersion, bool]) -> tuple[ServerState, ...]:
    return tuple(
        ServerState(name=f"s{place}", version=version, pinned=pinned) for place, (version, pinned) in enumerate(states)
    )


def test_an_evaluation_goes_with_the_next_batch_alone_and_with_its_redelivery() -> None:
    evaluations = Evaluations()
    assert evaluations.metrics(1, 0.0) == {}
    evaluations.record(Evaluated(version=V20, metrics={"eval/copy/pass@1": 0.5}))
    assert evaluations.metrics(2, 0.0) == {"eval/copy/pass@1": 0.5}
    assert evaluations.metrics(3, 0.0) == {}
    evaluations.record(Evaluated(version=V20, metrics={"eval/copy/pass@1": 0.75}))
    evaluations.record(Evaluated(version=V20, metrics={"eval/copy/pass@1": 1.0}))
    assert evaluations.metrics(2, 0.0) == {"eval/copy/pass@1": 0.5}  # a learner that lost it
    assert [evaluations.metrics(step, 0.0) for step in (4, 5)] == [{"eval/copy/pass@1": x} for x in (0.75, 1.0)]


def test_a_version_waits_while_every_server_is_pinned_behind_it_and_each_second_counts_once() -> None:
    evaluations = Evaluations()
    evaluations.announce(V1)
    assert evaluations.tick(servers((V0, True), (V0, False)), 10.0) is None  # one is free: nobody waits
    assert evaluations.tick(servers((V0, True)), 20.0) is None
    assert evaluations.metrics(1, 22.0) == {"eval/publish_wait": 2.0}
    assert evaluations.tick(servers((V0, True)), 23.0) is None
    assert evaluations.tick(servers((V0, False)), 25.0) == 5.0  # the whole wait
    assert evaluations.metrics(2, 30.0) == {"eval/publish_wait": 3.0}
    assert evaluations.metrics(3, 31.0) == {}


@pytest.mark.parametrize("states", [servers((V1, True)), servers((V0, False)), ()])
def test_nothing_waits_for_a_server_that_has_the_version_or_is_free_or_is_gone(states: tuple[ServerState, ...]) -> None:
    evaluations = Evaluations()
    assert evaluations.tick(servers((V0, True)), 0.0) is None  # nothing is announced
    evaluations.announce(V1)
    assert evaluations.tick(states, 1.0) is None
    assert evaluations.tick(states, 2.0) is None
    assert evaluations.metrics(1, 3.0) == {}


def test_a_server_that_dies_while_it_is_pinned_ends_the_wait() -> None:
    evaluations = Evaluations()
    evaluations.announce(V1)
    evaluations.tick(servers((V0, True)), 1.0)
    assert evaluations.tick((), 4.0) == 3.0
    assert evaluations.tick((), 5.0) is None


def test_what_comes_behind_the_last_batch_is_the_rest() -> None:
    evaluations = Evaluations()
    assert evaluations.rest() == {}
    late = [Evaluated(version=version, metrics={"eval/seconds": 3.0}) for version in (V1, V20)]
    for message in late:
        evaluations.record(message)
    assert [*evaluations.rest().values()] == late
    assert evaluations.rest() == {}


def test_a_step_that_is_delivered_again_brings_the_same_again_also_where_that_was_nothing() -> None:
    evaluations = Evaluations()
    evaluations.announce(V1)
    evaluations.tick(servers((V0, True)), 0.0)
    assert evaluations.metrics(2, 2.0) == {"eval/publish_wait": 2.0}
    evaluations.record(HALF)
    for step, told in ((1, {}), (2, {"eval/publish_wait": 2.0})):
        assert evaluations.metrics(step, 5.0, again=True) == told
    assert evaluations.metrics(3, 6.0) == HALF.metrics | {"eval/publish_wait": 4.0}


def test_a_later_service_knows_by_the_events_what_each_batch_has_told_and_what_none_has() -> None:
    log = Log()
    log.evaluated(HALF)
    assert log.batch(20) == HALF.metrics
    log.evaluated(ALL)
    log.evaluated(HALF)  # the same figures of the same version, and another evaluation
    log = log.again()
    assert [log.batch(step, again=True) for step in (19, 20)] == [{}, HALF.metrics]
    assert log.batch(21) == ALL.metrics
    log.evaluated(ALL)
    log = log.again()
    told = [HALF.metrics, ALL.metrics, HALF.metrics, ALL.metrics, {}]
    assert [log.batch(step, again=step < 22) for step in range(20, 25)] == told


def test_a_later_service_knows_the_waits_of_the_batches_and_begins_none_before_a_version_is_announced() -> None:
    log = Log()
    log.evaluations.announce(V1)
    log.evaluations.tick(servers((V0, True)), 1.0)
    assert log.batch(1, now=3.0) == {"eval/publish_wait": 2.0}
    log = log.again()
    assert log.evaluations.tick(servers((V0, True)), 5.0) is None
    assert log.batch(1, again=True, now=9.0) == {"eval/publish_wait": 2.0}
    assert log.batch(2, now=9.0) == {}


def test_what_was_told_behind_the_last_batch_is_not_told_when_the_run_goes_on() -> None:
    log = Log()
    log.evaluated(HALF)
    log.evaluated(ALL)
    assert log.rest(received=1) == [HALF, ALL]
    log = log.again()
    assert [log.batch(step) for step in (20, 21)] == [ALL.metrics, {}]
    log.evaluated(HALF)
    assert log.batch(22) == HALF.metrics


def test_evaluations_of_a_service_that_did_not_say_what_it_told_are_told_no_more() -> None:
    log = Log()
    log.events.append({"event": "evaluated", "version": "20.0", "metrics": {"eval/copy/pass@1": 0.5}})
    log.events.append({"event": "batch", "step": 20})
    assert log.again().batch(21) == {}


def test_a_step_that_is_put_together_again_keeps_the_wait_that_it_told_of() -> None:
    evaluations = Evaluations()
    evaluations.announce(V1)
    evaluations.tick(servers((V0, True)), 0.0)
    assert evaluations.metrics(2, 2.0) == {"eval/publish_wait": 2.0}
    assert evaluations.metrics(2, 5.0) == {"eval/publish_wait": 5.0}


def test_an_evaluation_whose_event_was_lost_gives_its_number_to_no_other() -> None:
    log = Log()
    log.evaluated(HALF)
    assert log.batch(20) == HALF.metrics
    log.events = [event for event in log.events if event["event"] != "evaluated"]
    log = log.again()
    log.evaluated(ALL)
    log = log.again()
    assert [log.batch(20, again=True), log.batch(21)] == [{}, ALL.metrics]


def test_a_pinned_server_takes_tickets_as_far_as_its_version_suffices_and_the_others_go_on(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """Two workers of one server each; the first is evaluated at version 0 while step after step is trained."""
    running = start(run={"steps": 9})
    publisher = running.publisher()
    pinned = running.peer(
        Hello(run=RUN, role="generator", name="p", servers=(ServerState(name="p-server", version=V0, pinned=True),))
    )
    pinned.send(Credit(capacity=1))
    free = running.worker("free")
    states = {}
    while len(states) < 2:
        states = {state.name: state for state in receive(publisher, Roster).servers}
    assert (states["p-server"].pinned, states["free-server"].pinned) == (True, False)
    learner = running.learner()
    early = receive_tickets(pinned, 1) + receive_tickets(free, 3)
    for ticket in early:
        answer(pinned if ticket in early[:1] else free, make_group, ticket)
    for step in range(2):
        learner.send(Next(step=step))
        assert len(receive(learner, ReceivedBatch).batch.groups) == 2
        version = PolicyVersion(step + 1)
        learner.send(Progress(version=version))
        running.announce(version, publisher=publisher)
        free.send(Applied(server="free-server", version=version))
        for ticket in receive_tickets(free, 2):
            assert ticket.issued_version.step == step + 1
            answer(free, make_group, ticket)
    assert pinned.receive(0.3) is None, "a ticket that version 0 does not suffice for"
    assert not running.events_of("publish.waited"), "the other server had every version"
    pinned.send(Evaluated(version=V0, metrics={"eval/copy/pass@1": 0.25}))
    pinned.send(Applied(server="p-server", version=V0))
    while {state.name: state for state in receive_roster(publisher).servers}["p-server"].pinned:
        pass
    learner.send(Next(step=2))
    assert receive(learner, ReceivedBatch).stats["evaluation"] == {"eval/copy/pass@1": 0.25}
    (told,) = running.events_of("evaluated")
    assert (told["worker"], told["version"]) == ("p", "0.0")
    assert [batch.get("evaluation") for batch in running.events_of("batch")] == [None, None, told["number"]]


def test_a_publish_that_waits_for_the_only_server_is_timed(start: Callable[..., Running]) -> None:
    running = start()
    publisher, worker = running.publisher(), running.worker()
    worker.send(Applied(server="w-server", version=V0, pinned=True))
    receive_pin(publisher, True)
    running.announce(V1, publisher=publisher)
    assert worker.receive(0.3) is None
    worker.send(Applied(server="w-server", version=V0))
    receive_pin(publisher, False)
    (waited,) = running.events_of("publish.waited")
    assert 0 < waited["seconds"] < 20


def test_the_end_waits_for_the_last_evaluation_and_tells_the_learner(start: Callable[..., Running]) -> None:
    running = start(publish={"timeout": 0.2}, evaluate={"every": 1, "timeout": 60.0})
    publisher, worker, learner = running.publisher(), running.worker(), running.learner()
    receive_tickets(worker, 4)
    running.announce(V20, publisher=publisher)
    worker.send(Applied(server="w-server", version=V20, pinned=True))
    receive_pin(publisher, True)
    learner.send(Finished(version=V20))
    assert learner.receive(0.8) is None  # longer than publish.timeout
    worker.send(Evaluated(version=V20, metrics={"eval/seconds": 3.0}))
    worker.send(Applied(server="w-server", version=V20))
    assert receive(learner, Evaluated) == Evaluated(version=V20, metrics={"eval/seconds": 3.0})
    assert "complete" in receive(learner, Stop).reason
    assert "complete" in receive(worker, Stop).reason
    worker.send(Bye())
    assert running.end() == 0
    (told,) = running.events_of("evaluated.late")
    assert told["numbers"] == [0]
    later = Evaluations()
    later.recover(read_events(running.events.path))
    assert later.rest() == {}


@pytest.mark.parametrize("ends", ["by its death", "never"])
def test_an_evaluation_that_does_not_come_back_holds_the_end_for_a_time_alone(
    start: Callable[..., Running], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_evaluate, "SCORING_TIME", 0.2)
    running = start(publish={"timeout": 0.2}, evaluate={"every": 1, "timeout": 0.2 if ends == "never" else 240.0})
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    running.announce(V20)
    worker.send(Applied(server="w-server", version=V20, pinned=True))
    learner.send(Finished(version=V20))
    if ends != "never":
        worker.send(Bye())
    assert "complete" in receive(learner, Stop).reason
    running.close()


def test_a_killed_service_tells_each_evaluation_with_the_batch_that_had_it_and_the_next_one_with_the_next(
    start_process: Callable[..., ServiceProcess], make_group: MakeGroup
) -> None:
    """Told with batch 1, a second one told with none; then the learner, too, begins again, at its first checkpoint."""
    service = start_process(run={"steps": 9}, evaluate={"every": 1})
    first, second = ({"eval/copy/pass@1": rate} for rate in (0.25, 0.75))
    peers: list[Dealer] = []

    def connect() -> tuple[Dealer, Dealer]:
        pair = [Dealer(service.address, service.config.stream, name=name) for name in ("w", "learner-0")]
        peers.extend(pair)
        return pair[0], pair[1]

    try:
        worker, learner = connect()
        greet(worker, V0)
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        for ticket in receive_tickets(worker, 4):
            answer(worker, make_group, ticket)
        receive(learner, Welcome)
        assert evaluation(learner, 0) == {}
        evaluated(service, worker, V0, first)
        assert evaluation(learner, 1) == first
        evaluated(service, worker, V1, second)
        for incarnation in (1, 2):
            service.kill()
            service.start()
            worker, learner = connect()
            greet(worker, V1)
            learner.send(Hello(run=RUN, role="learner", name="learner-0", version=PolicyVersion(0, incarnation)))
            if incarnation == 1:
                for ticket in receive_tickets(worker, 2):
                    answer(worker, make_group, ticket)
            receive(learner, Welcome)
            assert [evaluation(learner, step) for step in range(3)] == [{}, first, second]
    finally:
        for peer in peers:
            peer.close()


def greet(worker: Dealer, version: PolicyVersion) -> None:
    worker.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=version),)))
    worker.send(Credit(capacity=9))


def evaluated(service: ServiceProcess, worker: Dealer, version: PolicyVersion, metrics: dict[str, float]) -> None:
    """An evaluation, which the service has received."""
    before, deadline = len(service.events_of("evaluated")), time.monotonic() + WAIT
    worker.send(Evaluated(version=version, metrics=metrics))
    while len(service.events_of("evaluated")) == before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def evaluation(learner: Dealer, step: int) -> dict[str, float]:
    """What the batch of this step tells of evaluations."""
    learner.send(Next(step=step))
    return receive(learner, ReceivedBatch).stats["evaluation"]


def receive_pin(publisher: Dealer, pinned: bool) -> None:
    """Rosters, until the only server is pinned, or is not."""
    while [state.pinned for state in receive_roster(publisher).servers] != [pinned]:
        pass


def receive_roster(publisher: Dealer) -> Roster:
    """The next roster; what was applied is told between."""
    while not isinstance(message := publisher.receive(20.0), Roster):
        assert message is not None
    return message
