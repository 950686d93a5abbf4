"""Who gets the next ticket, and who counts as alive."""

from __future__ import annotations

import pytest

from streamrl.config import Config
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.workers import Workers, assign
from streamrl.stream.messages import Heartbeat, ServerState
from streamrl.types import PolicyVersion

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def server(name: str, version: PolicyVersion = V0) -> ServerState:
    return ServerState(name=name, version=version)


def new_buffer(staleness: float) -> Buffer:
    """Steps of four groups: `(staleness + 1) * 4` slots."""
    buffer = make_buffer(Config.model_validate({"replay": {"groups_per_step": 4, "max_staleness": staleness}}))
    buffer.begin(V0)
    buffer.acknowledge(V0)
    return buffer


def join(workers: Workers, name: str, capacity: int, *servers: ServerState) -> None:
    workers.join(name, name.encode(), servers, 0.0)
    workers.live[-1].capacity = capacity


def granted(buffer: Buffer, workers: Workers) -> dict[str, list[int]]:
    return {name: [t.group_id for t in tickets] for name, tickets in assign(buffer, workers.live, 0.0).items()}


def test_groups_spread_by_the_share_of_credit_in_use() -> None:
    workers = Workers(1.0)
    join(workers, "a", 8, server("sa"))
    join(workers, "b", 4, server("sb"))
    buffer = new_buffer(1.25)
    assert granted(buffer, workers) == {"a": [0, 2, 3, 5, 6, 8], "b": [1, 4, 7]}


def test_credit_is_a_level_that_open_tickets_count_against() -> None:
    workers = Workers(1.0)
    join(workers, "a", 2, server("sa"))
    buffer = new_buffer(1.25)
    assert granted(buffer, workers) == {"a": [0, 1]}
    assert granted(buffer, workers) == {}
    workers.live[0].capacity = 3
    assert granted(buffer, workers) == {"a": [2]}
    workers.live[0].capacity = 0
    buffer.release("a")
    assert granted(buffer, workers) == {}


def test_a_worker_whose_servers_are_behind_waits_and_the_others_go_on() -> None:
    workers = Workers(1.0)
    join(workers, "behind", 9, server("s0", V0))
    join(workers, "ahead", 9, server("s1", V1), server("s2", V0))
    buffer = new_buffer(0)
    assert granted(buffer, workers) == {"ahead": [0, 2], "behind": [1, 3]}
    buffer.acknowledge(V1)  # ahead of the learner, who has taken nothing: frees no slot
    assert granted(buffer, workers) == {}


def test_a_server_that_failed_a_publish_gets_no_tickets_until_it_has_that_version() -> None:
    workers = Workers(1.0)
    join(workers, "a", 1, server("sa"))
    worker = workers.live[0]
    worker.failed["sa"] = V1
    assert worker.newest is None
    assert granted(new_buffer(0), workers) == {}
    worker.applied("sa", V0)
    assert worker.newest is None
    worker.applied("sa", V1)
    assert worker.newest == V1


def test_a_learner_that_was_restored_behind_a_failed_publish_finds_its_server_ready_again() -> None:
    """The version that it missed is published no more: waiting for it would be for ever."""
    workers = Workers(1.0)
    join(workers, "a", 1, server("sa", PolicyVersion(20)))
    worker = workers.live[0]
    worker.missed("sa", PolicyVersion(21), incarnation=0)
    workers.follow(0)  # the same learner, over a new connection
    assert worker.newest is None
    workers.follow(1)
    assert worker.newest == PolicyVersion(20)
    worker.missed("sa", PolicyVersion(21), incarnation=1)  # told late
    assert worker.newest == PolicyVersion(20)


def test_weights_of_a_later_incarnation_end_a_failure_however_low_their_step() -> None:
    workers = Workers(1.0)
    join(workers, "a", 1, server("sa", PolicyVersion(20)))
    worker = workers.live[0]
    worker.missed("sa", PolicyVersion(21), incarnation=0)
    worker.applied("sa", PolicyVersion(20))
    assert worker.newest is None
    worker.applied("sa", PolicyVersion(20, incarnation=1))
    assert worker.newest == PolicyVersion(20, incarnation=1)


def test_ten_missed_heartbeats_take_a_worker_off_the_roster_and_a_word_brings_it_back() -> None:
    workers = Workers(heartbeat=1.0)
    join(workers, "a", 1, server("sa"))
    assert workers.silent(10.0) == []
    assert [worker.name for worker in workers.silent(10.1)] == ["a"]
    assert workers.silent(10.2) == []
    assert workers.servers == ()
    assert workers.owner("sa") is None
    workers.touch(b"a", 11.0)
    assert workers.servers == (server("sa"),)


def test_a_new_process_of_the_same_name_replaces_the_old_one() -> None:
    workers = Workers(1.0)
    join(workers, "a", 5, server("sa", V1))
    replaced = workers.join("a", b"second", (server("sa"),), 1.0)
    assert replaced is not None
    assert workers.touch(b"a", 2.0) is None
    assert workers.servers == (server("sa", V0),)
    again = workers.join("a", b"second", (server("sa"), server("sb")), 3.0)
    assert again is None
    assert len(workers.servers) == 2


def test_all_at_waits_for_every_live_server_that_has_not_failed() -> None:
    workers = Workers(1.0)
    assert workers.all_at(V1)
    join(workers, "a", 1, server("sa"), server("sb", V1))
    assert not workers.all_at(V1)
    workers.live[0].failed["sa"] = V1
    assert workers.all_at(V1)
    assert not workers.all_at(PolicyVersion(1, incarnation=1))


def test_the_busy_share_is_taken_between_heartbeats() -> None:
    workers = Workers(1.0)
    join(workers, "a", 1, server("sa"))
    join(workers, "b", 1, server("sb"))
    for now, busy in ((0.0, 0.0), (4.0, 1.0)):
        workers.live[0].busy.record(Heartbeat(busy=busy), now)
    assert workers.busy() == pytest.approx(0.125)  # a: 0.25, b: nothing known
    assert workers.busy() == pytest.approx(0.125)  # no news
    workers.live[0].busy.record(Heartbeat(busy=5.0), 8.0)
    assert workers.busy() == pytest.approx(0.5)


def test_drafts_are_counted_between_batches_and_from_zero_for_a_worker_that_begins_again() -> None:
    workers = Workers(1.0)
    join(workers, "a", 1, server("sa"))
    join(workers, "b", 1, server("sb"))
    assert workers.drafts() == (0, 0)
    workers.live[0].drafts.record(Heartbeat(verified=4, accepted=6))
    workers.live[1].drafts.record(Heartbeat(verified=1, accepted=0))
    assert workers.drafts() == (5, 6)
    assert workers.drafts() == (0, 0)
    workers.live[0].drafts.record(Heartbeat(verified=7, accepted=7))
    assert workers.drafts() == (3, 1)
    workers.join("a", b"another process", (server("sa"),), 0.0)
    workers.named("a").drafts.record(Heartbeat(verified=2, accepted=1))
    assert workers.drafts() == (2, 1)


def test_a_process_that_takes_another_name_is_that_worker_alone() -> None:
    workers = Workers(1.0)
    for name in ("w", "w2"):
        workers.join(name, b"A", (server("s"),), 0.0)
    assert [worker.name for worker in workers.live] == ["w2"]
    workers.leave(workers.live[0])
    assert workers.join("w", b"B", (server("s"),), 0.0) is None
    assert [worker.name for worker in workers.live] == ["w"]
