"""A peer's line to the replay service that outlives the service: it introduces itself again, wherever that is.

    unknown there, or words were lost ──Introduce, or a gap──▶ the opening words again
    unanswered for stream.reply_timeout ──▶ RUN/replay.address again; a new address: connect, opening words
    the same, and the peer insists ──▶ the opening words again

Learner and publisher talk through it; a worker, in asyncio, has a link of its own (`generate/link.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.stream.address import replay_address, told_address
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import Heartbeat, Introduce, Message, Stop
from streamrl.stream.sockets import Dealer, ReceivedBatch, StreamTimeout

log = logging.getLogger(__name__)


class PeerRefused(ConfigError):
    """The replay service does not let this peer take part; the text is the service's."""


class Peer:
    """A `Dealer` with a memory of how to begin. It belongs to the thread that made it.

    >>> peer = Peer(config, run_folder, "learner", opening)  # yields a Hello, and what is open
    >>> peer.send(Next(step=7))
    >>> received = peer.receive(timeout=1.0)  # None, a Message, or a ReceivedBatch; Introduce is answered here
    """

    def __init__(self, config: Config, run_folder: Path, name: str, opening: Callable[[], Iterable[Message]]) -> None:
        """Wait for the service's address, connect, and say the `opening` words: a Hello, then everything open.

        Raises TimeoutError where no service has told its address in `run.start_timeout`.
        """
        self._stream = config.stream
        self._interval = config.learner.tick  # seconds between two heartbeats
        self._run_folder = run_folder
        self._name = name
        self._keys = key_folder(config, run_folder)
        self._opening = opening
        self.address = replay_address(config, run_folder)
        self._dealer = self._connect()
        self.heard = self._looked = time.monotonic()
        self._opened = self._beaten = float("-inf")
        self._open()

    @property
    def silence(self) -> float:
        """Seconds since the service was heard last, or since the beginning."""
        return time.monotonic() - self.heard

    def send(self, message: Message) -> None:
        """Queue a message, on a new connection where the present one takes no more.

        Raises StreamTimeout, or ValueError for a message above `stream.max_message`.
        """
        try:
            self._dealer.send(message)
        except StreamTimeout as error:
            log.warning("%s: a new connection is tried", error)
            self._reconnect(told_address(self._run_folder) or self.address)
            self._dealer.send(message)

    def beat(self) -> None:
        """Say that this peer lives, once in `learner.tick` seconds: a service that does not know it then says so."""
        if time.monotonic() - self._beaten >= self._interval:
            self._beaten = time.monotonic()
            self.send(Heartbeat())

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds, and after an Introduce.

        Raises MalformedMessage, and PeerRefused where the service does not let this peer take part.
        """
        missed = self._dealer.missed
        received = self._dealer.receive(timeout)
        if received is None:
            self._look()
            return None
        self.heard = time.monotonic()
        if isinstance(received, Stop) and received.refused:
            raise PeerRefused(received.reason)
        introduce = isinstance(received, Introduce)
        # A service that was started again says it once for each message that was queued for it: one answer will do.
        if (introduce or self._dealer.missed > missed) and self.heard - self._opened >= self._interval:
            self._open()
        return None if introduce else received

    def insist(self) -> None:
        """Say the opening words again where the service was silent for `stream.reply_timeout`: its last word may be
        lost, and no later one shows that."""
        if time.monotonic() - max(self.heard, self._opened) >= self._stream.reply_timeout:
            self._open()

    def close(self) -> None:
        """May be called twice."""
        self._dealer.close()

    def _connect(self) -> Dealer:
        return Dealer(self.address, self._stream, self._keys, self._name)

    def _open(self) -> None:
        """Say the opening words, on a new connection where the present one takes no more."""
        self._opened = time.monotonic()
        try:
            self._say_all()
        except StreamTimeout as error:
            log.warning("%s: a new connection is tried", error)
            self._renew(told_address(self._run_folder) or self.address)
            self._say_all()

    def _say_all(self) -> None:
        for message in self._opening():
            self._dealer.send(message)

    def _look(self) -> None:
        """Follow a silent service to another address."""
        if time.monotonic() - max(self.heard, self._looked) < self._stream.reply_timeout:
            return
        self._looked = time.monotonic()
        told = told_address(self._run_folder)
        if told is not None and told != self.address:
            log.info("the replay service has moved from %s to %s", self.address, told)
            self._reconnect(told)

    def _reconnect(self, address: str) -> None:
        self._renew(address)
        self._open()

    def _renew(self, address: str) -> None:
        self._dealer.close()
        self.address = address
        self._dealer = self._connect()
