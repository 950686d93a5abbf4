"""A replay service that a test plays: a real socket, and a script."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from streamrl.config.replay import StreamConfig
from streamrl.stream.address import write_address
from streamrl.stream.codec import decode_group
from streamrl.stream.messages import Buffer, Heartbeat, Message, decode
from streamrl.stream.sockets import Router
from streamrl.types import Group

WAIT = 20.0  # seconds; longer than any wait that a test of a session configures
LOCAL = "tcp://127.0.0.1:0"
OPEN = StreamConfig(curve="off")

Word = Message | Group
Answer = Message | tuple[Message, list[Buffer]]  # with the frames behind it
Script = Callable[[Word], Iterable[Answer]]
M = TypeVar("M")


class ScriptedService:
    """It receives in the thread of the test; or, once it has a script to `play`, in one of its own. `close` it.

    Usage:
        service = ScriptedService(tmp_path)
        hello = service.expect(Hello)
        service.send(Introduce())
    """

    def __init__(
        self,
        folder: Path,
        stream: StreamConfig = OPEN,
        address: str = "tcp://127.0.0.1:0",
        script: Script | None = None,
    ) -> None:
        self.router = Router(address, stream)
        self.address = write_address(folder, self.router.address)
        self.peer = b""  # who spoke last
        self.received: list[Word] = []  # all but heartbeats
        self._orders: deque[Answer] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._play, args=(script,)) if script is not None else None
        if self._thread is not None:
            self._thread.start()

    def receive(self, timeout: float = WAIT) -> Any:
        """The next word, a message or a group; None after `timeout` seconds."""
        received = self.router.receive(timeout)
        if received is None:
            return None
        self.peer = received.peer
        word = decode_group(*received.frames) if len(received.frames) == 2 else decode(received.frames[0])
        if not isinstance(word, Heartbeat):
            self.received.append(word)
        return word

    def expect(self, kind: type[M], between: type | tuple[type, ...] = ()) -> M:
        """The next word of this kind; heartbeats may come before it, and words of the kinds `between`."""
        while not isinstance(word := self.receive(), kind):
            assert isinstance(word, (Heartbeat, between)), word
        return word

    def expect_nothing(self, seconds: float) -> bool:
        """No word but heartbeats for so long."""
        before, end = len(self.received), time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.receive(left)
        return len(self.received) == before

    def send(self, message: Message) -> None:
        """To who spoke last."""
        if self._thread is None:
            assert self.router.send(self.peer, message)
        else:
            self._orders.append(message)

    def loses(self, count: int) -> None:
        """So many words to who spoke last never arrive."""
        for _ in range(count):
            self.router._numbers(self.peer).stamp(b"")

    def wait_for(self, *kinds: type[Message]) -> list[Word]:
        """Of a service that plays: what was received until words of all these kinds were; it is forgotten here."""
        self.wait_until(lambda: {*kinds} <= {type(word) for word in self.received})
        received, self.received = self.received, []
        return received

    def wait_until(self, condition: Callable[[], object], seconds: float = WAIT) -> None:
        """Until something holds; a service without a script receives meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.received
            if self._thread is None:
                self.receive(0.02)
            else:
                time.sleep(0.01)

    def close(self) -> None:
        """May be called twice."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self.router.close()

    def _play(self, script: Script) -> None:
        while not self._ending.is_set():
            while self._orders:
                self._answer(self._orders.popleft())
            if (word := self.receive(0.02)) is not None:
                for answer in script(word):
                    self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        message, frames = answer if isinstance(answer, tuple) else (answer, [])
        self.router.send(self.peer, message, frames)
