"""The worker's line to the service, at a real Router that a test plays: nothing that was finished is lost on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from streamrl.config import Config
from streamrl.generate.link import ServiceLink
from streamrl.observe.events import EventLog, read_events
from streamrl.stream.address import tell_address
from streamrl.stream.codec import decode_group
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
    decode,
)
from streamrl.stream.sockets import Router
from streamrl.types import Group, PolicyVersion, Ticket

WAIT = 20.0
OPEN = Config.model_validate({"stream": {"curve": "off"}})
SERVER = ServerState(name="s", version=PolicyVersion(3))
MakeGroup = Callable[..., Group]
M = TypeVar("M")


class Service:
    """The other end, by hand."""

    def __init__(self, config: Config, folder: Path, address: str = "tcp://127.0.0.1:0") -> None:
        self.router = Router(address, config.stream)
        self.peer = b""
        self.address = self.router.address
        tell_address(folder, self.address)

    async def hear(self, kind: type[M], between: type | tuple[type, ...] = ()) -> M:
        """The next word of this kind; heartbeats may come before it, and words of the kinds `between`."""
        while True:
            received = await asyncio.to_thread(self.router.receive, WAIT)
            assert received is not None
            self.peer = received.peer
            message = decode_group(*received.frames) if len(received.frames) == 2 else decode(received.frames[0])
            if isinstance(message, kind):
                return message
            assert isinstance(message, (Heartbeat, between)), message

    def say(self, message: Message) -> None:
        assert self.router.send(self.peer, message)


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
                "stream": {"reply_timeout": 1.0, "curve": "off", **stream},
            }
        )
        service = Service(config, tmp_path)
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
            service.router.close()
            events.close()

    return run


async def greeted(service: Service) -> Hello:
    hello = await service.hear(Hello)
    assert (await service.hear(Credit)).capacity == 7
    return hello


def test_an_introduce_is_answered_by_hello_and_everything_that_is_open(at_work, make_group: MakeGroup) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        hello = await greeted(service)
        assert (hello.name, hello.servers, hello.tickets) == ("w", (SERVER,), ())
        for group_id in range(4):
            assert link.open(ticket(group_id))
        for group_id in range(3):
            link.finish(make_group(group_id))
        assert [(await service.hear(Group)).group_id for _ in range(3)] == [0, 1, 2]
        service.say(Accepted(group_id=0, attempt=0))
        service.say(Refused(group_id=1, attempt=0, reason="late"))
        while (await service.hear(Heartbeat)).tickets != ((3, 0), (2, 0)):
            pass
        service.say(Introduce())
        assert (await greeted(service)).tickets == ((3, 0), (2, 0))
        assert (await service.hear(Group)).group_id == 2
        assert not link.open(ticket(2))  # a service that lost its record may issue it again
        assert not link.open(ticket(3))

    at_work(script)


def test_a_service_that_listens_elsewhere_is_found_by_its_file(at_work, make_group: MakeGroup, tmp_path: Path) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0))
        await service.hear(Group)
        service.router.close()
        moved = Service(OPEN, tmp_path)
        try:
            assert (await greeted(moved)).tickets == ((0, 0),)
            assert (await moved.hear(Group)).group_id == 0
        finally:
            moved.router.close()

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


def test_a_worker_comes_back_where_what_it_heard_was_spoilt_on_the_way(at_work, tmp_path: Path) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.router.close()
        await asyncio.to_thread(spoil_a_connection, service.address)
        back = Service(OPEN, tmp_path, service.address)
        try:
            await back.hear(Hello)
            await back.hear(Credit)
        finally:
            back.router.close()

    at_work(script)


def test_a_worker_that_nobody_hears_waits_and_begins_again_when_the_service_is_back(
    at_work, make_group: MakeGroup, tmp_path: Path
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.router.close()
        heard = [await link.say(Heartbeat()) for _ in range(70)]  # more than the socket's queue holds
        assert heard[0]
        assert not all(heard)  # a new connection was tried meanwhile, and takes something again
        link.open(ticket(0))
        link.finish(make_group(0))
        back = Service(OPEN, tmp_path, service.address)
        try:
            await back.hear(Hello, between=Group)
            assert (await back.hear(Group, between=(Hello, Credit))).group_id == 0
        finally:
            back.router.close()

    at_work(script, reply_timeout=0.1)


def test_words_of_the_service_that_were_lost_make_the_worker_begin_again(at_work) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        service.router._numbers(service.peer)._said += 2
        service.say(Accepted(group_id=9, attempt=0))
        await greeted(service)

    at_work(script)


def test_a_group_whose_answer_was_lost_is_sent_again_in_time(at_work, make_group: MakeGroup) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0))
        for _ in range(2):
            assert (await service.hear(Group)).group_id == 0
        service.say(Accepted(group_id=0, attempt=0))
        while (await service.hear(Heartbeat, between=Group)).tickets:
            pass

    at_work(script, reply_timeout=0.3)


def test_a_drained_worker_takes_no_tickets_and_ends_when_the_last_group_is_answered_for(
    at_work, make_group: MakeGroup
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        draining = asyncio.create_task(link.drain(timeout=WAIT))
        assert (await service.hear(Credit)).capacity == 0
        link.finish(make_group(0))
        await service.hear(Group)
        assert not draining.done()
        service.say(Accepted(group_id=0, attempt=0))
        await asyncio.wait_for(draining, WAIT)
        await link.bye()
        await service.hear(Bye)

    at_work(script)


def test_a_group_that_is_larger_than_a_message_goes_as_placeholders(
    at_work, make_group: MakeGroup, tmp_path: Path
) -> None:
    async def script(service: Service, link: ServiceLink) -> None:
        await greeted(service)
        link.open(ticket(0))
        link.finish(make_group(0, tokens=10_000))
        group = await service.hear(Group)
        assert [sample.failure for sample in group.samples] == ["too_large", "too_large"]
        service.say(Accepted(group_id=0, attempt=0))

    at_work(script, max_message=1 << 12)
    assert [
        event["group_id"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "group.too_large"
    ]


def test_what_the_worker_must_act_on_is_handed_to_it(tmp_path: Path) -> None:
    config = Config.model_validate({"generate": {"heartbeat": 0.1}, "stream": {"curve": "off"}})
    service = Service(config, tmp_path)
    events = EventLog(tmp_path / "events.jsonl", "generator-0")

    async def go() -> None:
        link = ServiceLink(config, tmp_path, "w", address=service.address, servers=lambda: (SERVER,), events=events)
        try:
            await link.greet()
            await service.hear(Hello)
            service.say(Tickets(tickets=(ticket(5),)))
            service.say(Accepted(group_id=1, attempt=0))
            service.say(Stop(reason="over"))
            heard = [message for _ in range(3) if (message := await link.receive()) is not None]
            assert [type(message) for message in heard] == [Tickets, Stop]
        finally:
            link.close()

    try:
        asyncio.run(go())
    finally:
        service.router.close()
        events.close()
