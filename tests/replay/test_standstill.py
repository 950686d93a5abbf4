"""A service whose run makes no step: when it gives the run up, what it says, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from service_parts import V0, V1, Clock, MakeGroup, Running, answer, make_config, receive, receive_tickets

from streamrl.config import Config
from streamrl.progress import ProgressWatch
from streamrl.replay.standstill import Herald
from streamrl.stream.messages import Finished, GaveUp, Next, Progress, Stop
from streamrl.stream.sockets import ReceivedBatch
from streamrl.types import PolicyVersion
from tests.operations_table import documented

LIMIT = 1.5  # seconds
QUICK: dict[str, dict[str, Any]] = {
    "run": {"start_timeout": 0.1, "progress_timeout": LIMIT, "steps": 9},
    "replay": {"group_timeout": 1.0},
    "journal": {"commit_seconds": 0.0},  # also while no time passes
}


def end(running: Running, clock: Clock) -> int:
    clock.pass_until(lambda: not running.thread.is_alive())
    return running.end()


def test_a_service_whose_learner_never_comes_ends(start: Callable[..., Running], caplog: Any) -> None:
    running = start(**QUICK)
    code = running.end()
    documented("no learner step in run.progress_timeout=... s: no learner is there", caplog.text, code)
    assert [event["reason"] for event in running.events_of("gave_up")] == [
        "no learner step in run.progress_timeout=1.5 s: no learner is there"
    ]


def test_a_run_without_generators_ends_with_the_reason_for_everybody(
    start: Callable[..., Running], caplog: Any
) -> None:
    clock = Clock()
    running = start(clock, **QUICK, generate={"heartbeat": 0.1})  # silent for ten of them, the worker is lost
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    learner.send(Next(step=0))
    code = end(running, clock)
    told = receive(learner, Stop)
    documented("no learner step in run.progress_timeout=... s: no generator worker is there...", caplog.text, code)
    assert told.failed
    assert told.reason.endswith("no generator worker is there, 1 are silent")


def test_workers_that_deliver_nothing_end_the_run(start: Callable[..., Running], caplog: Any) -> None:
    clock = Clock()
    running = start(clock, **QUICK)
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    learner.send(Next(step=0))
    code = end(running, clock)
    stops = receive(worker, Stop), receive(learner, Stop)
    documented(
        "no learner step in run.progress_timeout=... s: step ... has not all of its groups from ... generator workers",
        caplog.text,
        code,
    )
    assert stops[0] == stops[1]


def test_a_learner_that_hangs_in_its_step_ends_the_run(
    start: Callable[..., Running], make_group: MakeGroup, caplog: Any
) -> None:
    clock = Clock()
    running = start(clock, **QUICK)
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4)[:2]:
        answer(worker, make_group, ticket)
    learner.send(Next(step=0))
    receive(learner, ReceivedBatch)
    code = end(running, clock)
    documented(
        "no learner step in run.progress_timeout=... s: the learner is at its step, and does not end it",
        caplog.text,
        code,
    )


def test_the_workers_are_told_of_steps_and_a_run_that_makes_them_goes_on(start: Callable[..., Running]) -> None:
    clock = Clock()
    running = start(clock, **QUICK)
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    step = 0
    received: list[Progress] = []
    while clock.now < 2 * LIMIT or not received:
        step += 1
        learner.send(Progress(version=PolicyVersion(step)))
        running.wait_for("learner.progress", step)
        clock.now += 0.1
        message = worker.receive(0.02)
        received += [message] if isinstance(message, Progress) else []
    assert running.thread.is_alive()
    assert [word.version for word in received] == sorted({word.version for word in received})


def test_a_run_that_has_finished_is_not_given_up(start: Callable[..., Running]) -> None:
    clock = Clock()
    ends = QUICK["run"] | {"stop_timeout": 0.1}
    running = start(clock, **QUICK | {"run": ends, "publish": {"timeout": 2 * LIMIT}})
    running.worker(version=V0)
    running.learner().send(Finished(version=V1))  # which the worker's server never gets
    running.wait_for("learner.finished")
    assert end(running, clock) == 0
    assert not running.events_of("gave_up")


def test_a_learner_that_gives_up_ends_everybody_with_its_reason(start: Callable[..., Running]) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    receive_tickets(worker, 4)
    learner.send(GaveUp(reason="8 steps in a row made no update"))
    assert receive(worker, Stop) == Stop(reason="8 steps in a row made no update", failed=True)
    assert running.end() == 1
    assert [event["reason"] for event in running.events_of("gave_up")] == ["8 steps in a row made no update"]


def test_a_worker_whose_scorer_is_broken_ends_everybody_with_its_reason(start: Callable[..., Running]) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    worker.send(GaveUp(reason="ZeroDivisionError: reward.py, line 7"))
    assert receive(learner, Stop) == Stop(reason="ZeroDivisionError: reward.py, line 7", failed=True)
    assert running.end() == 1


def test_a_new_life_of_the_learner_is_as_good_as_a_step_and_the_same_once_more_is_not() -> None:
    herald = Herald(timeout=10.0)
    lives = [PolicyVersion(4, incarnation=1), PolicyVersion(5, incarnation=1), PolicyVersion(4, incarnation=2)]
    assert [herald.is_new_life(version) for version in lives] == [True, False, True]


def test_workers_are_told_of_the_newest_step_in_good_time_and_once() -> None:
    herald = Herald(timeout=100.0)
    assert herald.due(0.0) is None
    herald.step(Progress(version=PolicyVersion(1)))
    herald.step(Progress(version=PolicyVersion(2)))
    assert herald.due(9.9) is None
    assert herald.due(10.0) == Progress(version=PolicyVersion(2))
    assert herald.due(30.0) is None


@dataclass
class Case:
    tree: dict[str, Any]
    seconds: float


@pytest.mark.parametrize(
    "case",
    [
        Case({}, 1800.0),  # twice replay.group_timeout
        Case({"replay": {"group_timeout": 50}, "run": {"start_timeout": 200}}, 400.0),
        Case({"run": {"progress_timeout": 1000}}, 1000.0),
    ],
)
def test_the_default_leaves_time_for_a_group_and_for_a_learner_that_comes_back(case: Case) -> None:
    assert Config.model_validate(case.tree).progress_timeout == case.seconds


def test_the_first_step_may_take_the_time_of_a_start_longer_and_the_others_may_not() -> None:
    config = make_config(run={"start_timeout": 5.0, "progress_timeout": 10.0}, replay={"group_timeout": 9.0})
    watch = ProgressWatch(config, 100.0)
    assert [watch.is_over(now) for now in (114.9, 115.1)] == [False, True]
    watch.step(120.0)
    assert [watch.is_over(now) for now in (129.9, 130.1)] == [False, True]
