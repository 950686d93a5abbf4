"""A worker's tickets and groups in its session with the replay service: nothing that was finished is lost.

    open ──▶ running ──finish──▶ outbox ──Accepted, Refused──▶ gone

A ticket is open from its arrival until the service has accepted or refused its group. Every heartbeat names the open
ones, so that their leases last. What becomes of a lost word or of a service that was started again is in
`stream/session.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.config import Config
from streamrl.generate.request_places import first_credit
from streamrl.observe.events import EventLog
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import (
    Accepted,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Message,
    Refused,
    ServerState,
    TicketKey,
)
from streamrl.stream.peer import AsyncPeer
from streamrl.stream.session import Word
from streamrl.stream.sockets import ReceivedBatch
from streamrl.types import Group, Ticket

log = logging.getLogger(__name__)


class ServiceLink(AsyncPeer):
    """A generator worker as the replay service knows it. `close` it.

    Usage:
        link = ServiceLink(config, run_folder, "generator-0", address=address, servers=..., events=events)
        await link.greet()
        message = await link.receive()  # Tickets, Publish or Stop; all other words are answered here
        link.open(ticket), link.finish(group)  # `deliver` and `beat` run beside it
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
        self._heartbeat = config.generate.heartbeat
        self._servers = servers
        self._events = events
        self._capacity = first_credit(config)
        self._draining = False
        self._running: dict[TicketKey, None] = {}
        self._settled = asyncio.Event()  # no ticket is open
        self._settled.set()
        super().__init__(config, run_folder, name, address, self._opening)

    @property
    def tickets(self) -> tuple[TicketKey, ...]:
        """The open ones: being generated, or finished and not answered for."""
        return (*self._running, *self.outbox.keys)

    def open(self, ticket: Ticket) -> bool:
        """Note a ticket that came. False for one that is open: after a crash the service may issue it again."""
        key = (ticket.group_id, ticket.attempt)
        if key in self._running or key in self.outbox:
            return False
        self._running[key] = None
        self._settled.clear()
        return True

    def finish(self, group: Group) -> None:
        """The group of an open ticket is done: it is sent, and kept until it is answered for."""
        key = (group.group_id, group.attempt)
        self._running.pop(key, None)
        self.ask(key, group)

    async def limit(self, capacity: int) -> None:
        """Hold so many tickets at most from now on; those that are there stay."""
        if not self._draining and capacity != self._capacity:
            self._capacity = capacity
            await self.send(Credit(capacity=capacity))

    async def drain(self, timeout: float) -> None:
        """Take no more tickets, and wait `timeout` seconds at most until no ticket is open."""
        self._draining, self._capacity = True, 0
        await self.send(Credit(capacity=0))
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            self._events.emit("worker.undrained", tickets=len(self.tickets))

    async def bye(self) -> None:
        """The last word: open tickets go to other workers at once."""
        await self.send(Bye())

    async def receive(self) -> Message | None:
        """What the worker itself must act on; None after a heartbeat's time without it.

        Raises PeerRefused where the service does not let this worker take part.
        """
        match message := await self.receive_word(self._heartbeat):
            case Accepted(group_id=group_id, attempt=attempt):
                self._answered((group_id, attempt))
            case Refused(group_id=group_id, attempt=attempt, reason=reason):
                self._events.emit("group.refused", group_id=group_id, attempt=attempt, reason=reason)
                self._answered((group_id, attempt))
            case ReceivedBatch():
                log.warning("unexpected batch from the replay service")
            case _:
                return message
        return None

    async def beat(self, busy: float, generated: int, verified: int = 0, accepted: int = 0) -> None:
        """One heartbeat: `busy` seconds, `generated` tokens, and of drafts the passes that `verified` some and those
        that were `accepted`, since the worker's start."""
        self.tick()
        await self.send(
            Heartbeat(tickets=self.tickets, busy=busy, generated=generated, verified=verified, accepted=accepted)
        )

    async def deliver(self) -> None:
        """Send the groups of the outbox, one after another, for ever."""
        await self.deliver_words(self._as_placeholders)

    def _opening(self) -> Iterator[Message]:
        servers, tickets = self._servers(), self.tickets
        yield Hello(run=self._run, role="generator", name=self.name, servers=servers, tickets=tickets)
        yield Credit(capacity=self._capacity)

    def _answered(self, key: TicketKey) -> None:
        self.answered(key)
        if not self.tickets:
            self._settled.set()

    def _as_placeholders(self, word: Word, error: ValueError) -> Group:
        """What goes in the place of a group that is larger than a message may be, so that its step can be made."""
        assert isinstance(word, Group)
        self._events.emit("group.too_large", group_id=word.group_id, reason=str(error))
        log.warning("group %d is replaced by placeholders: %s", word.group_id, error)
        return word.as_placeholders("too_large")
