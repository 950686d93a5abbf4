"""A worker's line to the replay service, which outlives the service: nothing that was finished is lost on it.

    Hello (servers, open tickets) ─▶ Credit ─▶ every group that has no answer yet ─▶ heartbeats
      ▲                                                                               │
      └── Introduce · a gap in the service's words · the service listens elsewhere ◀──┘

A ticket is open from its arrival until the service has accepted or refused its group. Every heartbeat names
the open ones, so that their leases last; a group is sent again until it is answered for, and the service
answers a second copy of an accepted one by Accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from streamrl.config import Config
from streamrl.generate.outbox import Outbox
from streamrl.observe.events import EventLog
from streamrl.stream.address import told_address
from streamrl.stream.identity import run_identity
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import (
    Accepted,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Introduce,
    MalformedMessage,
    Message,
    Refused,
    ServerState,
    Stop,
    TicketKey,
)
from streamrl.stream.peer import PeerRefused
from streamrl.stream.sockets import AsyncDealer, ReceivedBatch, StreamTimeout
from streamrl.types import Group, Ticket

log = logging.getLogger(__name__)


class ServiceLink:
    """A generator worker as the replay service knows it. `close` it.

    >>> link = ServiceLink(config, run_folder, "generator-0", address=address, servers=..., events=events)
    >>> await link.greet()
    >>> message = await link.receive()  # Tickets, Publish or Stop; all other words are answered here
    >>> link.open(ticket), link.finish(group)  # `deliver` and `beat` run beside it
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        name: str,
        *,
        address: str,
        servers: Callable[[], tuple[ServerState, ...]],
        events: EventLog,
    ) -> None:
        """`servers` tells the present state of the worker's servers. Raises ConfigError as `run_identity` does."""
        self.name = name
        self._run = run_identity(run_folder, config.run.id).id
        self.address = address
        self._missed = 0  # words of the service that were lost on the way
        self._config = config
        self._run_folder = run_folder
        self._servers = servers
        self._events = events
        self._capacity = config.generate.least_in_flight or config.generate.groups_in_flight
        self._draining = False
        self._running: dict[TicketKey, None] = {}
        self._outbox = Outbox()
        self._to_send = asyncio.Event()  # the outbox may hold an unsent group
        self._settled = asyncio.Event()  # no ticket is open
        self._settled.set()
        self._sending = asyncio.Lock()  # nobody sends while the connection is replaced
        self._is_stuck = False  # the present connection takes nothing more
        self._stuck_since: float | None = None  # and nothing was heard since
        self._unheard = False  # a word of ours could not even be queued
        self._progress = time.monotonic()  # when a group was last put into the outbox, or answered for
        self._heard = time.monotonic()
        self._dealer = self._connect()

    @property
    def silence(self) -> float:
        """Seconds since the service was heard last, or since the beginning."""
        return time.monotonic() - self._heard

    @property
    def tickets(self) -> tuple[TicketKey, ...]:
        """The open ones: being generated, or finished and not answered for."""
        return (*self._running, *self._outbox.keys)

    def open(self, ticket: Ticket) -> bool:
        """Note a ticket that came. False for one that is open: after a crash the service may issue it again."""
        key = (ticket.group_id, ticket.attempt)
        if key in self._running or key in self._outbox:
            return False
        self._running[key] = None
        self._settled.clear()
        return True

    def finish(self, group: Group) -> None:
        """The group of an open ticket is done: it is sent, and kept until it is answered for."""
        self._running.pop((group.group_id, group.attempt), None)
        self._progress = time.monotonic()
        self._outbox.put(group)
        self._to_send.set()

    async def greet(self) -> None:
        """Say who this is and what it still has; everything that has no answer is sent again."""
        self._unheard = False
        servers, tickets = self._servers(), self.tickets
        if not await self.say(Hello(run=self._run, role="generator", name=self.name, servers=servers, tickets=tickets)):
            return
        await self.say(Credit(capacity=self._capacity))
        self._outbox.again()
        self._to_send.set()

    async def say(self, message: Message) -> bool:
        """Send one message. False when the service takes none now: the next heartbeat then begins with `greet`.

        Raises StreamTimeout when it has taken none for `run.silence_timeout` seconds.
        """
        return await self._put(lambda dealer: dealer.send(message))

    async def limit(self, capacity: int) -> None:
        """Hold so many tickets at most from now on; those that are there stay."""
        if not self._draining and capacity != self._capacity:
            self._capacity = capacity
            await self.say(Credit(capacity=capacity))

    async def drain(self, timeout: float) -> None:
        """Take no more tickets, and wait `timeout` seconds at most until no ticket is open."""
        self._draining, self._capacity = True, 0
        await self.say(Credit(capacity=0))
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            self._events.emit("worker.undrained", tickets=len(self.tickets))

    async def bye(self) -> None:
        """The last word: open tickets go to other workers at once."""
        await self.say(Bye())

    async def receive(self) -> Message | None:
        """What the worker itself must act on; None after a heartbeat's time without it.

        Raises PeerRefused where the service does not let this worker take part.
        """
        try:
            message = await self._dealer.receive(self._config.generate.heartbeat)
        except MalformedMessage as error:
            log.warning("malformed message from the replay service: %s", error.reason)
            return None
        if message is None:
            await self._follow()
            return None
        self._heard = time.monotonic()
        if self._dealer.missed > self._missed:
            self._missed = self._dealer.missed
            await self.greet()
        return await self._hear(message)

    async def beat(self, busy: float, generated: int) -> None:
        """One heartbeat: `busy` seconds and `generated` tokens since the worker's start."""
        if self._unheard:
            await self.greet()
        if len(self._outbox) and time.monotonic() - self._progress > self._config.stream.reply_timeout:
            self._progress = time.monotonic()
            self._outbox.again()  # an answer was lost, and no later word has told so
        await self.say(Heartbeat(tickets=self.tickets, busy=busy, generated=generated))
        self._to_send.set()  # what could not be sent is tried again

    async def deliver(self) -> None:
        """Send the groups of the outbox, one after another, for ever."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while (group := self._outbox.unsent()) is not None:
                if not await self._send_group(group):
                    break  # the next heartbeat tries again

    def close(self) -> None:
        self._dealer.close()

    async def _hear(self, message: Message | ReceivedBatch) -> Message | None:
        match message:
            case Introduce():
                log.info("the replay service asks who this is")
                await self.greet()
            case Accepted(group_id=group_id, attempt=attempt):
                self._answered((group_id, attempt))
            case Refused(group_id=group_id, attempt=attempt, reason=reason):
                self._events.emit("group.refused", group_id=group_id, attempt=attempt, reason=reason)
                self._answered((group_id, attempt))
            case Stop(reason=reason, refused=True):
                raise PeerRefused(reason)
            case ReceivedBatch():
                log.warning("unexpected batch from the replay service")
            case _:
                return message
        return None

    def _answered(self, key: TicketKey) -> None:
        self._progress = time.monotonic()
        self._outbox.answered(key)
        if not self.tickets:
            self._settled.set()

    async def _send_group(self, group: Group) -> bool:
        """Send one group; one larger than a message may be goes as placeholders, so that its step can be made."""
        try:
            sent = await self._put(lambda dealer: dealer.send_group(group))
        except ValueError as error:
            self._events.emit("group.too_large", group_id=group.group_id, reason=str(error))
            log.warning("group %d is replaced by placeholders: %s", group.group_id, error)
            self._outbox.put(group.as_placeholders("too_large"))
            return True
        if sent:
            self._outbox.sent(group)
        return sent

    async def _put(self, send: Callable[[AsyncDealer], Awaitable[None]]) -> bool:
        """Queue something for the service, and tell whether that was possible."""
        async with self._sending:
            try:
                await send(self._dealer)
            except StreamTimeout as error:
                self._unheard = self._is_stuck = True
                if self._stuck_since is None:
                    self._stuck_since = time.monotonic()
                    log.warning("%s", error)
                if time.monotonic() - self._stuck_since > self._config.run.silence_timeout:
                    raise
                return False
        if self._stuck_since is not None and self._heard > self._stuck_since:
            self._stuck_since = None
        return True

    async def _follow(self) -> None:
        """A service that was started again may listen elsewhere; one that takes nothing gets a new connection.

        A socket does not connect again by itself where what it heard was spoilt on the way.
        """
        told = told_address(self._run_folder) or self.address
        if told != self.address:
            log.info("the replay service has moved from %s to %s", self.address, told)
        elif not self._is_stuck:
            return
        async with self._sending:
            self._dealer.close()
            self.address, self._missed, self._is_stuck = told, 0, False
            self._dealer = self._connect()
        await self.greet()

    def _connect(self) -> AsyncDealer:
        return AsyncDealer(self.address, self._config.stream, key_folder(self._config, self._run_folder), self.name)
