"""The worker's line to the service, at a real Router that a test plays: nothing that was finished is lost on it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from streamrl.config import Config
from streamrl.generate.link import ServiceLink
from streamrl.observe.events import EventLog, read_events
from streamrl.stream.messages import (
    Accepted,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Introduce,
    Message,
    Refused,
    ServerState,
    Stop,
    Tickets,
)
from streamrl.types import Group, PolicyVersion, Ticket
from tests.scripted_service import WAIT, ScriptedService

LARGE = 50_000  # tokens of a sample; three such groups are more than may wait
ENOUGH = 100_000  # words; more than the queues of a connection hold
SERVER = ServerState(name="s", version=PolicyVersion(3))
MakeGroup = Callable[..., Group]
M = TypeVar("M")


class Service(ScriptedService):
    """One that a script on asyncio plays."""

    async def next_of(self, kind: type[M], between: type | tuple[type, ...] = ()) -> M:
        return await asyncio.to_thread(self.expect, kind, between)


def ticket(group_id: int) -> Ticket:
    return Ticket(group_id=group_id, task="copy", prompt_index=0, seed=1, issued_version=PolicyVersion(0), deadline=0.0)


@pytest.fixture
def at_work(tmp_path: Path) -> Callable[[Callable[[Service, ServiceLink], Awaitable[None]]], None]:
    """`at_work(script, max_message=...)`: run a script with a service and a link whose loops are going."""

    @asynccontextmanager
    async def loops(link: ServiceLink) -> AsyncIterator[None]:
        async def listen() -> None:
            while True:
                await link.receive()

        async def beat() -> None:
            while True:
                await link.beat(busy=1.0, generated=2)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(work) for work in (listen(), beat(), link.deliver())]
        yield
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()

    def run(script: Callable[[Service, ServiceLink], Awaitable[None]], **stream: object) -> None:
        config = Config.model_validate(
            {
                "generate": {"heartbeat": 0.1, "groups_in_flight": 7},
                "stream": {"reply_timeout": WAIT, "curve": "off", **stream},
            }
        )
        service = Service(tmp_path, config.stream)
        events = EventLog(tmp_path / "events.jsonl", "generator-0")

        async def go() -> None:
            link = ServiceLink(config, tmp_path, "w", address=service.address, servers=lambda: (SERVER,), events=events)
            try:
                await link.greet()
                async with loops(link):
                    await script(service, link)
            finally:
                link.close()

        try:
            asyncio.run(go())
        finally:
            service.close()
            events.close()

    return run


async def greeted(service: Service) -> Hello:
    hello = await service.next_of(Hello)
    assert (await service.next_of(Credit)).capacity == 7
    return hello


def test_an_introduce_is_answered_by_hello_and_everything_that_is_open(at_work, make_group: MakeGroup) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        hello = await greeted(service)
        assert (hello.name, hello.servers, hello.tickets) == ("w", (SERVER,), ())
        for group_id in range(4):
            assert link.open(ticket(group_id))
        for group_id in range(3):
            link.finish(make_group(group_id))
        assert [(await service.next_of(Group)).group_id for _ in range(3)] == [0, 1, 2]
        service.send(Accepted(group_id=0, attempt=0))
        service.send(Refused(group_id=1, attempt=0, reason="late"))
        while (await service.next_of(Heartbeat)).tickets != ((3, 0), (2, 0)):
            pass
        service.send(Introduce())
        assert (await greeted(service)).tickets == ((3, 0), (2, 0))
        assert (await service.next_of(Group)).group_id == 2
        assert not link.open(ticket(2))  # a service that lost its record may issue it again
        assert not link.open(ticket(3))

    at_work(script)


def test_a_service_that_listens_elsewhere_is_found_by_its_file(at_work, make_group: MakeGroup, tmp_path: Path) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0))
        await service.next_of(Group)
        service.close()
        moved = Service(tmp_path)
        try:
            assert (await greeted(moved)).tickets == ((0, 0),)
            assert (await moved.next_of(Group)).group_id == 0
        finally:
            moved.close()

    at_work(script)


def spoil_a_connection(address: str) -> None:
    """Listen there, and say to the first peer what no ZeroMQ says: its socket never connects again by itself."""
    host, port = address.removeprefix("tcp://").split(":")
    listener = socket.create_server((host, int(port)))
    connection, _ = listener.accept()
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    connection.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER")
    connection.sendall(b"\x02" + (1 << 60).to_bytes(8, "big"))  # a frame that is larger than any may be
    while connection.recv(4096):
        pass
    connection.close()
    listener.close()


def test_a_worker_comes_back_where_what_it_received_was_spoilt_on_the_way(at_work, tmp_path: Path) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.close()
        await asyncio.to_thread(spoil_a_connection, service.address)
        back = Service(tmp_path, address=service.address)
        try:
            await back.next_of(Hello)
            await back.next_of(Credit)
        finally:
            back.close()

    at_work(script, reply_timeout=1.0)


async def fill(link: ServiceLink) -> None:
    """Say something until the connection takes no more: the socket's queue is full, and behind it what the kernel took
    before it told that the other end is gone."""
    for _ in range(ENOUGH):
        if not await link.send(Heartbeat()):
            return
    pytest.fail(f"a connection without a service has taken {ENOUGH} words")


def test_a_worker_that_nobody_answers_waits_and_begins_again_when_the_service_is_back(
    at_work, make_group: MakeGroup, tmp_path: Path
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.close()
        await fill(link)
        link.open(ticket(0))
        link.finish(make_group(0))
        back = Service(tmp_path, address=service.address)
        try:
            await back.next_of(Hello, between=Group)
            assert (await back.next_of(Group, between=(Hello, Credit))).group_id == 0
        finally:
            back.close()

    at_work(script, reply_timeout=0.1)


def test_words_of_the_service_that_were_lost_make_the_worker_begin_again(at_work) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.loses(2)
        service.send(Accepted(group_id=9, attempt=0))
        await greeted(service)

    at_work(script)


def test_a_group_whose_answer_was_lost_is_sent_again_in_time(at_work, make_group: MakeGroup) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0))
        for _ in range(2):
            assert (await service.next_of(Group)).group_id == 0
        service.send(Accepted(group_id=0, attempt=0))
        while (await service.next_of(Heartbeat, between=Group)).tickets:
            pass

    at_work(script, reply_timeout=0.3)


def test_a_worker_that_is_cut_since_nobody_reads_loses_no_group(at_work, make_group: MakeGroup) -> None:
    """More groups than may wait of one connection: the door cuts it, and lets it in again when it has been read."""
    groups = 7

    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        for group_id in range(groups):
            link.open(ticket(group_id))
            link.finish(make_group(group_id, tokens=LARGE))
        deadline = time.monotonic() + WAIT
        while not service.router.cut:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        received: set[int] = set()
        while len(received) < groups:
            group_id = (await service.next_of(Group, between=(Hello, Credit))).group_id
            received.add(group_id)
            service.router.send(service.peer, Accepted(group_id=group_id, attempt=0))

    at_work(script, max_message=1 << 20, reply_timeout=1.0)


def test_a_drained_worker_takes_no_tickets_and_ends_when_the_last_group_is_answered_for(
    at_work, make_group: MakeGroup
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        draining = asyncio.create_task(link.drain(timeout=WAIT))
        assert (await service.next_of(Credit)).capacity == 0
        link.finish(make_group(0))
        await service.next_of(Group)
        assert not draining.done()
        service.send(Accepted(group_id=0, attempt=0))
        await asyncio.wait_for(draining, WAIT)
        await link.bye()
        await service.next_of(Bye)

    at_work(script)


def test_a_group_that_is_larger_than_a_message_goes_as_placeholders(
    at_work, make_group: MakeGroup, tmp_path: Path
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0, tokens=10_000))
        group = await service.next_of(Group)
        assert [sample.failure for sample in group.samples] == ["too_large", "too_large"]
        service.send(Accepted(group_id=0, attempt=0))

    at_work(script, max_message=1 << 12)
    assert [
        event["group_id"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "group.too_large"
    ]


def test_what_the_worker_must_act_on_is_handed_to_it(tmp_path: Path) -> None:
    config = Config.model_validate({"generate": {"heartbeat": 0.1}, "stream": {"curve": "off"}})
    service = Service(tmp_path, config.stream)
    events = EventLog(tmp_path / "events.jsonl", "generator-0")

    async def go() -> None:
        link = ServiceLink(config, tmp_path, "w", address=service.address, servers=lambda: (SERVER,), events=events)
        try:
            await link.greet()
            await service.next_of(Hello)
            service.send(Tickets(tickets=(ticket(5),)))
            service.send(Accepted(group_id=1, attempt=0))
            service.send(Stop(reason="over"))
            received: list[Message | None] = [None]
            async with asyncio.timeout(WAIT):
                while not isinstance(received[-1], Stop):
                    received.append(await link.receive())
            assert [type(message) for message in received if message is not None] == [Tickets, Stop]
        finally:
            link.close()

    try:
        asyncio.run(go())
    finally:
        service.close()
        events.close()
