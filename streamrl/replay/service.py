"""The replay service: the one I/O shell round the buffer, the workers' roster and the journal.

One thread, one loop: hear what came, look at the clock, hand out tickets, deliver the batch that the learner
waits for. Nothing in it waits for a peer. What each peer may say is listed in `stream/messages.py`.

    starting ──learner's Hello──▶ serving ──Finished──▶ last publish ──every server has it──▶ stopping ──Byes──▶ exit
                                                             └──── publish.timeout ────▶┘        └─ stop_timeout ─▶┘

Tickets begin with the learner's Hello, whose version says at which step, under which incarnation.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import zmq

from streamrl.config import Config
from streamrl.observe.events import EventLog, event_path
from streamrl.replay.buffer import AttemptsExhausted, Buffer, GroupRefused, Stored
from streamrl.replay.journal import Journal
from streamrl.replay.order import StrictOrder
from streamrl.replay.workers import Worker, Workers, assign
from streamrl.stream.codec import decode_group
from streamrl.stream.messages import (
    Accepted,
    Announce,
    Applied,
    BatchHeader,
    BatchStats,
    Bye,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    MalformedMessage,
    Message,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Refused,
    Roster,
    Stop,
    Tickets,
    decode,
)
from streamrl.stream.sockets import Router
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

BURST = 256
# messages between two looks at the clock, so that a flood of groups delays neither a batch nor an expiry.

TICK = 0.2
# seconds of the longest wait for a message; a signal or a deadline is noticed within it.

REMEMBERED = 1024
# peers whose malformed messages were logged already; beyond it the oldest is forgotten, and logged again.


def main(config: Config, run_folder: Path) -> int:
    """Run the role until the run is finished or a signal comes. Returns the exit code."""
    events = EventLog(event_path(run_folder, "replay"), "replay-0")
    service = Service(config, run_folder, events)
    codes = {signal.SIGTERM: 0, signal.SIGINT: 130}

    def interrupt(number: int, _frame: FrameType | None) -> None:
        service.interrupt(signal.Signals(number).name, codes[signal.Signals(number)])

    before = {number: signal.signal(number, interrupt) for number in codes}
    try:
        return service.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        events.close()


class Service:
    """Listens from construction on; `run` serves until the end."""

    def __init__(self, config: Config, run_folder: Path, events: EventLog) -> None:
        """Bind, open the journal, and tell the address in `RUN/replay.address`. Raises zmq.ZMQError, OSError."""
        self._config = config
        self._events = events
        self._address_file = run_folder / "replay.address"
        self._router = Router(config.replay.address, config.stream)
        self._journal = Journal(run_folder / "journal") if config.observe.journal else None
        self._workers = Workers(config.generate.heartbeat)
        self._buffer: Buffer | None = None
        self._learner: bytes | None = None
        self._publisher: bytes | None = None
        self._roster: Roster | None = None  # as the publisher knows it
        self._asked: int | None = None  # the step that the learner waits for
        self._delivered: BatchHeader | None = None
        self._tokens = 0  # generated, in the groups accepted since the last batch
        self._final: PolicyVersion | None = None
        self._deadline = float("inf")  # of the last publish, then of the Byes
        self._exit: int | None = None  # set when stopping
        self._interrupted: tuple[str, int] | None = None
        self._complained: OrderedDict[bytes, int] = OrderedDict()
        self.malformed = 0  # messages refused as malformed
        self.address = _reachable(self._router.address)
        _write(self._address_file, self.address)
        events.emit("replay.listening", address=self.address)

    def interrupt(self, reason: str, code: int) -> None:
        """End soon, with exit code `code`; may be called from a signal handler or another thread."""
        self._interrupted = (reason, code)

    def run(self) -> int:
        """Serve until the end and close everything. Returns the exit code."""
        try:
            while not self._ended():
                self._receive()
                self._on_time(time.monotonic())
                self._hand_out(time.monotonic())
        except AttemptsExhausted as error:
            log.error("%s", error)
            self._stop(str(error), 1)
        finally:
            self._close()
        self._events.emit("replay.end", code=self._exit, malformed=self.malformed)
        return 1 if self._exit is None else self._exit

    def _ended(self) -> bool:
        if self._interrupted is not None:
            reason, code = self._interrupted
            self._stop(f"the replay service was ended by {reason}", code)
            return True
        if self._exit is None:
            return False
        return not self._workers.live or self._exit != 0 or time.monotonic() >= self._deadline

    def _close(self) -> None:
        self._address_file.unlink(missing_ok=True)
        if self._journal is not None:
            self._journal.close()
        self._router.close()

    # -- what is heard

    def _receive(self) -> None:
        received = self._router.receive(TICK)
        for _ in range(BURST):
            if received is None:
                return
            identity, frames = received
            try:
                self._hear(identity, frames, time.monotonic())
            except MalformedMessage as error:
                self._refuse_malformed(identity, error)
            received = self._router.receive(0)
        if received is not None:
            raise AssertionError("unreachable")

    def _hear(self, identity: bytes, frames: list[zmq.Frame], now: float) -> None:
        worker = self._workers.hear(identity, now)
        if len(frames) == 2 and worker is not None:
            self._on_group(worker, frames)
            return
        if len(frames) != 1:
            raise MalformedMessage(f"{len(frames)} frames from {'a generator' if worker else 'no generator'}")
        message = decode(frames[0].buffer)
        if isinstance(message, Hello):
            self._on_hello(identity, message, now)
        elif worker is not None:
            self._on_worker(worker, message, now)
        elif identity == self._learner:
            self._on_learner(message, now)
        elif identity == self._publisher:
            self._on_publisher(message)
        else:
            raise MalformedMessage(f"{type(message).__name__} before a Hello")
