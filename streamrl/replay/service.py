"""The replay service: one process, one thread, one loop.

    recover the journal ─▶ listen ─▶ (receive, tick) until the run is over ─▶ exit code

Everything that it decides is in `replay/core.py`; here are its socket, its clock, its signals and its files.

It may be killed at any moment and started again, at the same address: the journal tells what was promised, and
every peer that it does not know is asked to introduce itself. The checkpoint that the learner's Hello names is
the authority on what is trained; whatever was consumed after it is delivered again.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import zmq

from streamrl.config import Config
from streamrl.observe.descriptors import raise_limit
from streamrl.observe.events import EventLog, event_path, role_events
from streamrl.replay.core import Core
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.journal import JournalDamaged
from streamrl.replay.listening import listen
from streamrl.stream.address import address_path, write_address
from streamrl.stream.door import DoorFailed
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.sockets import Router

log = logging.getLogger(__name__)

# Messages between two ticks, so that a flood of groups delays neither a batch nor an expiry.
BURST = 256

# Seconds of the longest wait for a message; a signal or a deadline is noticed within it.
TICK = 0.2


def main(config: Config, run_folder: Path) -> int:
    """Run the role until the run is finished or a signal comes. Returns the exit code."""
    raise_limit()
    codes = {signal.SIGTERM: 0, signal.SIGINT: 130}
    service: Service | None = None

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if service is None:
            raise SystemExit(codes[signal.Signals(number)])
        service.interrupt(signal.Signals(number).name, codes[signal.Signals(number)])

    before = {number: signal.signal(number, interrupt) for number in codes}
    events = EventLog(event_path(run_folder, "replay"), "replay-0")
    try:
        service = Service(config, run_folder, events)
        return service.run()
    except (OSError, zmq.ZMQError, JournalDamaged, KeysUnusable, DoorFailed) as error:
        log.error("%s", error)
        log.debug("the replay service ends", exc_info=True)
        return 1
    finally:
        events.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class Service:
    """Listens from construction on; `run` serves until the end."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        events: EventLog,
        *,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Recover, bind, and tell the address in `RUN/replay.address`.

        `router`: what it listens at instead of a socket of its own. Raises JournalFull, JournalDamaged, KeysUnusable,
        OSError, zmq.ZMQError; AnotherRun for another run's journal.
        """
        self._run_folder = run_folder
        self._events = events
        self._clock = clock
        self._durable = DurableBuffer(config, run_folder, events, clock)
        self._router = router or listen(config, run_folder)
        self.core = Core(config, self._durable, self._router.send, events, clock())
        if config.evaluate.every:
            self.core.recover(role_events(run_folder, "replay"))
        self._interrupted: tuple[str, int] | None = None
        self.address = write_address(run_folder, self._router.address, config.replay.host)
        events.emit("ready", address=self.address)

    def interrupt(self, reason: str, code: int) -> None:
        """End soon, with exit code `code`; may be called from a signal handler or another thread."""
        self._interrupted = (reason, code)

    def run(self) -> int:
        """Serve until the end and close everything. Returns the exit code."""
        try:
            while self.turn():
                continue
        except BaseException:
            self._durable.close()
            self._router.close()
            raise
        refused, cut = self._router.refused, self._router.cut
        self._close()
        code = self.core.code
        self._events.emit("replay.end", code=code, malformed=self.core.malformed, refused=refused, cut=cut)
        return code

    def turn(self) -> bool:
        """Handle what has come, and do what is due: once. False at the end."""
        if self._interrupted is not None:
            self.core.interrupt(*self._interrupted)
            return False
        if self.core.is_over():
            return False
        emptied = self._receive()
        self.core.tick(self._clock(), emptied=emptied)
        return True

    def _receive(self) -> bool:
        """Handle what has come, at most `BURST` messages; wait for the first one until something is due.

        True where that was all. After a pause the sockets, too, need a moment to find what has come.
        """
        timeout = self.core.longest_wait(self._clock(), TICK)
        for _ in range(BURST):
            received = self._router.receive(timeout)
            if received is None:
                return True
            timeout = 0.0
            self.core.handle(received, self._clock())
        return False

    def _close(self) -> None:
        address_path(self._run_folder).unlink(missing_ok=True)
        self._durable.commit(self._clock())
        self._durable.close()
        self._router.close()
