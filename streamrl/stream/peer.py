"""The two drivers of a session with the replay service: a thread (learner, publisher), and asyncio (worker).

They have the socket, the clock and RUN/replay.address; what happens when is in `stream/session.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic

from streamrl.config import Config
from streamrl.stream.address import read_address, replay_address
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import Heartbeat, MalformedMessage, Message, TicketKey
from streamrl.stream.session import K, Outbox, Session, State, Word
from streamrl.stream.sockets import Dealer, ReceivedBatch, StreamTimeout

log = logging.getLogger(__name__)

Opening = Callable[[], Iterable[Message]]


class _Driver(Generic[K]):
    """What both drivers have. `close` it."""

    def __init__(
        self, config: Config, run_folder: Path, name: str, session: Session[K], *, on_loop: bool = False
    ) -> None:
        self._config = config
        self._run_folder = run_folder
        self._name = name
        self._on_loop = on_loop
        self._session = session
        self._connect()

    @property
    def address(self) -> str:
        """Where the service listens."""
        return self._session.address

    @property
    def outbox(self) -> Outbox[K, Word]:
        """What has no answer."""
        return self._session.outbox

    @property
    def silence(self) -> float:
        """Seconds since the service last sent something, or since the beginning."""
        return time.monotonic() - self._session.last_seen

    def answered(self, key: K) -> None:
        """What was asked by this key has its answer."""
        self._session.answered(key, time.monotonic())

    def close(self) -> None:
        """May be called twice."""
        self._dealer.close()

    def _handle(self, received: Message | ReceivedBatch) -> Message | ReceivedBatch | None:
        return self._session.handle(received, self._dealer.missed, time.monotonic())

    def _connect(self) -> None:
        keys = key_folder(self._config, self._run_folder)
        self._dealer = Dealer(self.address, self._config.stream, keys, self._name, on_loop=self._on_loop)
        self._session.connected()

    def _reconnect(self, found: str | None) -> None:
        self._session.leave(found, time.monotonic())
        self._dealer.close()
        self._connect()


class Peer(_Driver[Hashable]):
    """A session in the thread that made it.

    Usage:
        peer = Peer(config, run_folder, "learner", opening)  # yields a Hello, and what the service must know
        peer.ask("next", Next(step=7))  # until `peer.answered("next")`
        received = peer.receive(timeout=1.0)  # None, a Message, or a ReceivedBatch
    """

    def __init__(self, config: Config, run_folder: Path, name: str, opening: Opening) -> None:
        """Wait for the service's address, connect, and say the `opening` words.

        Raises TimeoutError where no service has found its address in `run.start_timeout`.
        """
        self._interval = config.learner.tick  # seconds between two heartbeats
        self._beaten = float("-inf")
        session: Session[Hashable] = Session(
            replay_address(config, run_folder),
            time.monotonic(),
            opening=opening,
            reply_timeout=config.stream.reply_timeout,
            settle=config.learner.tick,
            patience=config.stream.reply_timeout,
        )
        super().__init__(config, run_folder, name, session)
        self.send()

    def send(self, *messages: Message) -> None:
        """Queue what is due: the opening words, these, and the outbox; on a new connection where the present one takes
        no more.

        Raises StreamTimeout, or ValueError for a message above `stream.max_message`.
        """
        if self._session.state is State.BLOCKED:
            self._follow()
        left: list[Word] = [*messages]
        try:
            self._send(left)
        except StreamTimeout as error:
            self._session.blocked(error, time.monotonic())
            self._follow()
            try:
                self._send(left)
            except StreamTimeout as again:
                self._session.blocked(again, time.monotonic())
                raise

    def ask(self, key: Hashable, message: Message) -> None:
        """Send a message, again and again until it is `answered`. Raises as `send`."""
        self._session.put(key, message, time.monotonic())
        self.send()

    def beat(self) -> None:
        """Say that this peer lives, once in `learner.tick` seconds: a service that does not know it then says so."""
        now = time.monotonic()
        self._session.tick(now)
        if now - self._beaten >= self._interval:
            self._beaten = now
            self.send(Heartbeat())

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds, and after an Introduce or a malformed message.

        Raises PeerRefused where the service does not let this peer take part.
        """
        try:
            received = self._dealer.receive(timeout)
        except MalformedMessage as error:
            log.warning("malformed message from the replay service: %s", error.reason)
            return None
        if received is not None:
            received = self._handle(received)
        elif not self._session.is_patient(time.monotonic()):
            self._follow()
        self.send()
        return received

    def insist(self) -> None:
        """Say the opening words again where the service was silent for `stream.reply_timeout`: its last word may be
        lost, and no later one shows that."""
        self._session.insist(time.monotonic())
        self.send()

    def _send(self, left: list[Word]) -> None:
        for word in self._session.owed(time.monotonic(), left):
            self._dealer.send(word)
        while (unsent := self.outbox.unsent()) is not None:
            key, word = unsent
            self._dealer.send(word)
            self.outbox.sent(key)

    def _follow(self) -> None:
        """Connect to where the service listens now, where that is needed."""
        if self._session.leaves(found := read_address(self._run_folder)):
            self._reconnect(found)


class AsyncPeer(_Driver[TicketKey]):
    """A session on asyncio: one task receives, any may send.

    Usage:
        peer = AsyncPeer(config, run_folder, "generator-0", address, opening)
        await peer.send(Applied(server=server, version=version))  # True
        message = await peer.receive_word(timeout=1.0)
    """

    def __init__(self, config: Config, run_folder: Path, name: str, address: str, opening: Opening) -> None:
        """Connect; the `opening` words come before what is said first."""
        reply_timeout = config.stream.reply_timeout
        session: Session[TicketKey] = Session(address, time.monotonic(), opening=opening, reply_timeout=reply_timeout)
        super().__init__(config, run_folder, name, session, on_loop=True)
        self._due = asyncio.Event()  # the outbox may hold an unsent word
        self._sending = asyncio.Lock()  # nobody sends while the connection is replaced

    def ask(self, key: TicketKey, word: Word) -> None:
        """Let `deliver` send a word, again and again until it is `answered`."""
        self._session.put(key, word, time.monotonic())
        self._due.set()

    async def send(self, *words: Word) -> bool:
        """Send what is due: the opening words, then these. False when the service takes none now.

        Raises StreamTimeout when it has taken none for `run.silence_timeout` seconds, and ValueError as `Dealer.send`.
        """
        async with self._sending:
            if self._session.state is State.BLOCKED:
                return False
            try:
                for word in self._session.owed(time.monotonic(), [*words]):
                    await self._dealer.send_async(word)
            except StreamTimeout as error:
                if self._session.blocked(error, time.monotonic()) > self._config.run.silence_timeout:
                    raise
                return False
        self._due.set()
        return True

    async def greet(self) -> None:
        """Say the opening words again: they have changed."""
        self._session.changed()
        await self.send()

    def tick(self) -> None:
        """Send the outbox again where no answer came in time, with what is said next."""
        self._session.tick(time.monotonic())

    async def deliver_words(self, instead: Callable[[Word, ValueError], Word]) -> None:
        """Send the words of the outbox, one after another, for ever.

        `instead(word, error)` is sent in the place of a word that cannot be.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            while (unsent := self.outbox.unsent()) is not None:
                key, word = unsent
                try:
                    is_sent = await self.send(word)
                except ValueError as error:
                    word = instead(word, error)
                    self.outbox.put(key, word)
                    is_sent = await self.send(word)
                if not is_sent:
                    break  # until something is said again
                self.outbox.sent(key)

    async def receive_word(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds, and after an Introduce or a malformed message.

        Raises PeerRefused where the service does not let this peer take part.
        """
        try:
            received = await self._dealer.receive_async(timeout)
        except MalformedMessage as error:
            log.warning("malformed message from the replay service: %s", error.reason)
            return None
        if received is None:
            if not self._session.is_patient(time.monotonic()):
                await self._follow()
            return None
        before, received = self._session.state, self._handle(received)
        # After BLOCKED the next `send` says the opening words: here one may block again, and nothing is received then.
        if before is State.OPEN and self._session.state is State.UNKNOWN:
            await self.send()
        return received

    async def _follow(self) -> None:
        """Connect to where the service listens now, where that is needed."""
        found = read_address(self._run_folder)
        if self._session.leaves(found):
            async with self._sending:
                self._reconnect(found)
            await self.send()
