"""Capacity counted in requests: which of them run, which tickets are wanted, and that the bound stays what it was."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.config.generate import GenerateConfig
from streamrl.config.in_flight import most_requests, tickets, wanted, without_lag
from streamrl.generate.request_places import PlacedPolicy, RequestPlaces, first_credit
from streamrl.generate.submission import Submission
from streamrl.observe.events import event_path, read_events
from streamrl.replay.buffer import make_buffer
from streamrl.replay.workers import Worker, assign
from streamrl.stream.messages import ServerState, TicketKey
from streamrl.types import PolicyVersion, Ticket

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))

from replay_schedule import answer

DEADLINE = 300.0  # seconds; a server's end on busy cores


def config(**generate: Any) -> Config:
    """P = 8 groups of G = 4."""
    return Config.model_validate({"generate": {"group_size": 4, **generate}, "replay": {"groups_per_step": 8}})


def most_tickets(config: Config, pool: GenerateConfig) -> int:
    """Tickets that a worker of the pool holds at the most."""
    return tickets(most_requests(config, pool)) if pool.by_sample else without_lag(config, pool).groups_in_flight


@pytest.mark.parametrize(
    ("generate", "requests", "held"),
    [
        ({"groups_in_flight": 16}, 64, 16),
        ({"groups_in_flight": 16, "submission": "sample"}, 64, 65),
        ({"submission": "sample", "requests_in_flight": 6}, 6, 7),
        ({"submission": "sample", "requests_in_flight": "auto"}, 24 * 4, 24 * 4 + 1),  # N = 24 slots at the most
        # Megatron-RL's lag L: round((L + 1) P) groups or round((L + 1) P G) requests, over all workers
        ({"lag": 0}, 8 * 4, 8),
        ({"lag": 1.5}, 20 * 4, 20),
        ({"lag": -0.5}, 4 * 4, 4),
        ({"lag": -1}, 1 * 4, 1),
        ({"lag": -0.5, "workers": 3}, 2 * 4, 2),  # 2, 1, 1
        ({"lag": -0.5, "submission": "sample"}, 16, 17),
        ({"lag": -1, "submission": "sample"}, 1, 2),
        ({"lag": 0.25, "submission": "sample", "workers": 3}, 14, 15),  # 40: 14, 13, 13
    ],
)
def test_each_form_of_capacity_says_how_many_requests_and_tickets_a_worker_has(generate, requests, held):
    given = config(**generate)
    assert (most_requests(given, given.generate), most_tickets(given, given.generate)) == (requests, held)
    own = given.of_worker(0)
    assert own.generate.lag is None
    assert (most_requests(own, own.generate), most_tickets(own, own.generate)) == (requests, held)
    assert first_credit(own) <= held


def test_the_workers_parts_are_the_whole_lag():
    given = config(lag=0.25, submission="sample", workers=3)
    parts = [given.of_worker(index).generate.requests_in_flight for index in range(4)]
    assert parts == [14, 13, 13, 13]  # the fourth has joined


@pytest.mark.parametrize(
    ("generate", "said"),
    [
        ({"requests_in_flight": 8}, "requests_in_flight: 8 counts requests, and submission=group .*submission=sample"),
        ({"submission": "sample", "least_in_flight": 2}, "least_in_flight: 2 counts groups.*requests_in_flight=auto"),
        ({"lag": 1, "groups_in_flight": 8}, "groups_in_flight: 8 is not possible beside lag=1.*allowed: 32, or lag="),
        ({"lag": 1, "submission": "sample", "requests_in_flight": "auto"}, "requests_in_flight: auto .*allowed: null"),
        ({"lag": -1.5}, "greater than or equal to -1"),
        ({"lag": -1, "workers": 2}, "generate.lag: -1 lets 1 group be in flight, none for some of 2 workers"),
        ({"lag": -0.9, "submission": "sample", "workers": 4}, "generate.lag: -0.9 lets 3 requests .*up to 3 workers"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(generate, said):
    with pytest.raises(ValueError, match=said):
        config(**generate)


def test_a_worker_whose_groups_are_gone_before_their_requests_wants_a_ticket_yet():
    assert wanted(places=4, group_size=2, groups=0, asked=9) == 1


def test_the_oldest_groups_requests_run_first_and_each_answer_makes_room_for_the_next():
    submission = Submission(places=3, group_size=2)
    for group_id in (5, 4):
        submission.open((group_id, 0))
    late = [submission.ask((5, 0)) for _ in range(2)]
    early = [submission.ask((4, 0)) for _ in range(2)]
    assert submission.start() == [*early, late[0]]
    submission.end(early[0])
    submission.end(early[0])  # twice is once
    assert submission.start() == [late[1]]
    assert submission.running == 3
    submission.resize(1)
    submission.end(late[0])
    assert (submission.start(), submission.running) == ([], 2)
    waits = submission.ask((4, 0))
    submission.end(waits)  # at its deadline
    for number in (early[1], late[1]):
        submission.end(number)
    assert (submission.start(), submission.running) == ([], 0)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 60), st.integers(0, 90))
def test_one_group_waits_ahead_of_the_places_and_no_more_are_wanted_than_there_may_be(places, size, groups, asked):
    told = wanted(places, size, groups, asked)
    assert told <= tickets(places) == places + 1
    added = told - groups
    if added > 0:  # with one less a place could be empty, or the next request would have to wait for a ticket
        assert asked + (added - 1) * size < places + size
    if groups < told < tickets(places):
        assert asked + added * size >= places + size


class Hand:
    """A worker with one server, as the service knows it and as it is: each answer is as long as chance says."""

    def __init__(self, name: str, places: int) -> None:
        server = ServerState(name=f"server of {name}", version=PolicyVersion(0))
        self.known = Worker(name, name.encode(), 0.0, {server.name: server})
        self.begin(places)

    def begin(self, places: int) -> None:
        self.submission = Submission(places, 2)
        self.left: dict[TicketKey, int] = {}
        self.tickets: dict[TicketKey, tuple[Ticket, PolicyVersion]] = {}
        self.asked: dict[int, TicketKey] = {}
        self.running: set[int] = set()

    def take(self, ticket: Ticket) -> None:
        key = ticket.group_id, ticket.attempt
        assert key not in self.tickets, "one ticket twice"
        self.submission.open(key)
        self.left[key], self.tickets[key] = 2, (ticket, self.known.newest)
        self.asked |= {self.submission.ask(key): key for _ in range(2)}

    def start(self) -> None:
        self.running |= set(self.submission.start())
        assert len(self.running) == self.submission.running <= self.submission.places
        assert len(self.running) == min(self.submission.places, len(self.asked)), "a place is empty"

    def answer(self, number: int) -> TicketKey | None:
        """One request is answered; the ticket where it was its group's last."""
        key = self.asked.pop(number)
        self.running.discard(number)
        self.submission.end(number)
        self.left[key] -= 1
        if self.left[key]:
            return None
        self.submission.close(key)
        return key


@settings(max_examples=25)
@given(
    places=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    groups=st.integers(1, 3),
    staleness=st.sampled_from([0, 0.5, 1, 2.5, 8]),
    release=st.sampled_from(["eager", "just_in_time"]),
    chance=st.randoms(use_true_random=False),
)
def test_the_real_buffer_keeps_its_bound_and_trains_each_group_once_whatever_is_held(
    places: tuple[int, int], groups: int, staleness: float, release: str, chance: random.Random
) -> None:
    steps = 12
    replay = {"groups_per_step": groups, "max_staleness": staleness, "release": release}
    sections = {"run": {"steps": steps}, "replay": replay}
    buffer = make_buffer(Config.model_validate(sections | {"generate": {"group_size": 2}}))
    buffer.begin(PolicyVersion(0))
    buffer.acknowledge(PolicyVersion(0))
    hands = [Hand(name, count) for name, count in zip("ab", places, strict=True)]
    trained: list[int] = []
    versions: dict[int, int] = {}  # of the groups
    step = deaths = 0
    now = 0.0

    def turn() -> None:
        nonlocal now
        now += 1.0
        for hand in hands:
            hand.known.capacity = hand.submission.tickets
        buffer.gate.tick(now, sum(hand.known.capacity for hand in hands))
        for name, granted in assign(buffer, [hand.known for hand in hands], now).items():
            for ticket in granted:
                next(hand for hand in hands if hand.known.name == name).take(ticket)
        for hand in hands:
            hand.start()
            assert buffer.held(hand.known.name) == len(hand.left) <= tickets(hand.submission.places)
        assert buffer.charged <= buffer.order.capacity
        buffer.drain()

    def answer_one(hand: Hand) -> None:
        # Mostly the youngest: the last sample of an old group is long.
        number = max(hand.running) if chance.random() < 0.8 else chance.choice(sorted(hand.running))
        if (key := hand.answer(number)) is not None:
            ticket, version = hand.tickets.pop(key)
            del hand.left[key]
            versions[ticket.group_id] = version.step
            assert buffer.complete(hand.known.name, answer(ticket, version), (), 10) is not None

    while step < steps:
        turn()
        able = [hand for hand in hands if hand.running]
        if able:
            answer_one(chance.choice(able))
        if deaths < 2 and chance.random() < 0.03:  # a worker is killed, and another one comes in its place
            gone = chance.choice(hands)
            buffer.release(gone.known.name)
            gone.begin(gone.submission.places)
            deaths += 1
        if (not able or chance.random() < 0.3) and (batch := buffer.pop(step)) is not None:
            trained += [stored.group_id for stored in batch]
            assert all(step - versions[stored.group_id] <= buffer.order.worst_staleness for stored in batch)
            step += 1
            buffer.acknowledge(PolicyVersion(step))
            for hand in hands:
                (server,) = hand.known.servers
                hand.known.applied(server, PolicyVersion(step))
    assert trained == list(range(steps * groups))


class Engine:
    """A policy that answers when the test says so."""

    def __init__(self) -> None:
        self.inside: dict[str, asyncio.Event] = {}
        self.ended: list[str] = []

    async def generate(self, ids, sampling, n, request_id=None, **options):
        self.inside[request_id] = asyncio.Event()
        if request_id not in self.ended:
            await self.inside[request_id].wait()
        del self.inside[request_id]
        return [request_id]

    async def abort(self, request_id=""):
        self.ended.append(request_id)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_a_request_waits_for_a_place_and_one_that_is_ended_or_cancelled_leaves_its_own():
    async def all_of_it() -> None:
        places, engine = RequestPlaces(Submission(1, 3)), Engine()
        places.open((0, 0))
        policy = PlacedPolicy(engine, places, (0, 0))
        asking = {name: asyncio.ensure_future(policy.generate([], {}, 1, name)) for name in "abcd"}
        await until(lambda: set(engine.inside) == {"a"})
        await policy.abort("b")  # at its deadline: nobody may wait for a place then
        assert await asking["b"] == ["b"]
        asking["c"].cancel()
        engine.inside["a"].set()
        assert await asking["a"] == ["a"]
        await until(lambda: set(engine.inside) == {"d"})
        engine.inside["d"].set()
        assert await asking["d"] == ["d"]
        places.close((0, 0))
        assert (places.submission.running, places.submission.tickets) == (0, 2)

    asyncio.run(all_of_it())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("requests", [6, "auto"])
def test_a_worker_by_sample_gives_whole_groups_and_finishes_what_it_has_begun(
    start_run: Callable[..., Any], requests: Any
) -> None:
    """G = 4: six places are those of a group and of half of the next one."""
    run = start_run(submission="sample", requests_in_flight=requests, probes=0, sampling={"max_new_tokens": 64})
    batch = run.batch(0)
    assert [group.group_id for group in batch.groups] == list(range(4))
    assert [len(group.samples) for group in batch.groups] == [4] * 4
    assert not any(sample.is_placeholder for sample in batch.samples)
    run.worker.send_signal(signal.SIGTERM)
    assert run.worker.wait(DEADLINE) == 0, run.log("generator")
    assert [event["tickets"] for event in run.events("replay", "worker.gone")] == [0]
    assert not run.events("generator", "worker.undrained")
    assert not run.events("generator", "group.refused")
    held = most = 0
    for event in read_events(event_path(run.folder, "replay")):
        held += len(event["tickets"]) if event["event"] == "tickets" else -(event["event"] == "group.accepted")
        most = max(most, held)
    assert most <= most_tickets(run.config, run.config.generate)
    assert requests == "auto" or most > 2  # by group, six requests are those of one
