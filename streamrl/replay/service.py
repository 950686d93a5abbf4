"""The replay service: the one I/O shell round the buffer, the workers' roster and the journal.

One thread, one loop: hear what came, look at the clock, hand out tickets, deliver the batch that the learner
waits for. Nothing in it waits for a peer. What each peer may say is listed in `stream/messages.py`.

    starting ──learner's Hello──▶ serving ──Finished──▶ last publish ──every server has it──▶ stopping ──Byes──▶ exit
                                                             └──── publish.timeout ────▶┘        └─ stop_timeout ─▶┘

Tickets begin with the learner's Hello, whose version says at which step, under which incarnation.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import OrderedDict
from pathlib import Path
from types import FrameType

import zmq

from streamrl.config import Config
from streamrl.observe.events import EventLog, event_path
from streamrl.replay.buffer import AttemptsExhausted, Buffer, GroupRefused, Stored
from streamrl.replay.journal import Journal
from streamrl.replay.order import make_order
from streamrl.replay.workers import Worker, Workers, assign
from streamrl.stream.address import address_path, tell_address
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
    finally:
        events.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class Service:
    """Listens from construction on; `run` serves until the end."""

    def __init__(self, config: Config, run_folder: Path, events: EventLog) -> None:
        """Bind, open the journal, and tell the address in `RUN/replay.address`. Raises zmq.ZMQError, OSError."""
        self._config = config
        self._events = events
        self._run_folder = run_folder
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
        self._complained: OrderedDict[bytes, None] = OrderedDict()  # peers whose malformed messages were told
        self.malformed = 0  # messages refused as malformed
        self.address = tell_address(run_folder, self._router.address)
        events.emit("ready", address=self.address)

    def interrupt(self, reason: str, code: int) -> None:
        """End soon, with exit code `code`; may be called from a signal handler or another thread."""
        self._interrupted = (reason, code)

    def run(self) -> int:
        """Serve until the end and close everything. Returns the exit code."""
        try:
            while not self._ended(time.monotonic()):
                self._receive()
                self._on_time(time.monotonic())
                self._hand_out(time.monotonic())
        except AttemptsExhausted as error:
            self._stop(str(error), 1)
        finally:
            self._close()
        code = 1 if self._exit is None else self._exit
        self._events.emit("replay.end", code=code, malformed=self.malformed)
        return code

    def _ended(self, now: float) -> bool:
        if self._interrupted is not None:
            reason, code = self._interrupted
            self._stop(f"the replay service was ended by {reason}", code)
            return True
        if self._exit is None:
            return False
        return self._exit != 0 or not self._workers.live or now >= self._deadline

    def _close(self) -> None:
        address_path(self._run_folder).unlink(missing_ok=True)
        if self._journal is not None:
            self._journal.close()
        self._router.close()

    # -- what peers say

    def _receive(self) -> None:
        """Hear what has come, at most `BURST` messages; wait for the first one."""
        timeout = TICK
        for _ in range(BURST):
            received = self._router.receive(timeout)
            if received is None:
                return
            timeout = 0.0
            identity, frames = received
            try:
                self._hear(identity, frames, time.monotonic())
            except MalformedMessage as error:
                self._refuse_malformed(identity, error)

    def _hear(self, identity: bytes, frames: list[zmq.Frame], now: float) -> None:
        worker = self._workers.hear(identity, now)
        if worker is not None and len(frames) == 2:
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

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        self._events.emit("replay.hello", peer=hello.role, name=hello.name, version=hello.version)
        if self._exit is not None:
            self._router.send(identity, Stop(reason="the run is over"))
        elif hello.role == "generator":
            if replaced := self._workers.join(hello.name, identity, hello.servers, now):
                self._release(replaced, "another process took its name")
            for server in hello.servers:
                self._acknowledge(server.version)
        elif hello.role == "publisher":
            self._publisher, self._roster = identity, None
        else:
            assert hello.version is not None  # the message's own check
            self._on_learner_hello(identity, hello.version)

    def _on_learner_hello(self, identity: bytes, start: PolicyVersion) -> None:
        if self._buffer is None:
            self._buffer = _new_buffer(self._config, start)
            for server in self._workers.servers:
                self._acknowledge(server.version)
        elif self._buffer.start != start:
            reason = f"tickets began at version {self._buffer.start}: start the replay service again for {start}"
            self._router.send(identity, Stop(reason=reason))
            return
        self._learner = identity

    def _on_worker(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Credit(capacity=capacity):
                worker.capacity = capacity
            case Heartbeat():
                worker.busy.hear(message, now)
            case Applied() | PublishFailed() if message.server not in worker.servers:
                raise MalformedMessage(f"server {message.server} is not one of worker {worker.name}")
            case Applied(server=server, version=version):
                worker.applied(server, version)
                self._acknowledge(version)
                self._to_publisher(message)
            case PublishFailed(server=server, version=version, reason=reason):
                worker.failed[server] = version
                self._events.emit("publish.failed", server=server, version=version, reason=reason)
                self._to_publisher(message)
            case Bye():
                self._workers.leave(worker)
                self._release(worker, "it said Bye")
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a generator")

    def _on_learner(self, message: Message, now: float) -> None:
        match message:
            case Next(step=step):
                self._asked = step
            case Progress(version=version):
                self._events.emit("learner.progress", version=version)
            case Finished(version=version):
                self._events.emit("learner.finished", version=version)
                self._final, self._deadline = version, now + self._config.publish.timeout
            case Bye():
                self._learner, self._asked = None, None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a learner")

    def _on_publisher(self, message: Message) -> None:
        match message:
            case Announce(version=version):
                self._events.emit("publish.announced", version=version)
            case Publish(server=server, version=version):
                owner = self._workers.owner(server)
                if owner is None or not self._tell(owner, message):
                    reason = "no live worker owns this server"
                    self._to_publisher(PublishFailed(server=server, version=version, reason=reason))
            case Bye():
                self._publisher = None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a publisher")

    def _on_group(self, worker: Worker, frames: list[zmq.Frame]) -> None:
        group = decode_group(*(frame.buffer for frame in frames))
        answer = {"group_id": group.group_id, "attempt": group.attempt}
        try:
            if self._buffer is None:
                raise GroupRefused("no ticket was given yet")
            stored = self._buffer.complete(worker.name, group, frames, sum(len(frame) for frame in frames))
        except GroupRefused as error:
            self._events.emit("group.refused", worker=worker.name, reason=str(error), **answer)
            self._tell(worker, Refused(reason=str(error), **answer))
            return
        if self._journal is not None:
            self._journal.append_group([frame.buffer for frame in frames])
        self._tokens += stored.tokens
        self._events.emit("group.accepted", worker=worker.name, tokens=stored.tokens, **answer)
        self._tell(worker, Accepted(**answer))

    def _refuse_malformed(self, identity: bytes, error: MalformedMessage) -> None:
        """Count and log it; answer where an answer helps. A group's ticket is issued again."""
        self.malformed += 1
        if identity not in self._complained:
            log.warning("malformed message from %r refused: %s", identity, error.reason)
            self._events.emit("replay.malformed", peer=identity.decode(errors="replace"), reason=error.reason)
        self._complained[identity] = None
        if len(self._complained) > REMEMBERED:
            self._complained.popitem(last=False)
        worker = self._workers.hear(identity, time.monotonic())
        if worker is not None and error.ticket is not None:
            self._refuse_group(worker, *error.ticket, error.reason)
        elif worker is None and identity not in (self._learner, self._publisher):
            self._router.send(identity, Stop(reason=f"refused: {error.reason}"[:4096]))

    def _refuse_group(self, worker: Worker, group_id: int, attempt: int, reason: str) -> None:
        if self._buffer is not None:
            try:
                self._buffer.fail(worker.name, group_id, attempt, reason)
            except GroupRefused as error:
                reason = f"{reason}; {error}"
        self._tell(worker, Refused(group_id=group_id, attempt=attempt, reason=reason[:4096]))

    # -- what time brings

    def _on_time(self, now: float) -> None:
        for worker in self._workers.silent(now):
            self._release(worker, "it was silent")
        if self._buffer is not None and self._exit is None:
            for ticket in self._buffer.expire(now):
                self._events.emit("ticket.expired", group_id=ticket.group_id, attempt=ticket.attempt)
        if self._final is None or self._exit is not None:
            return
        if published := self._workers.all_at(self._final):
            self._events.emit("publish.complete", version=self._final)
        elif now >= self._deadline:
            log.warning("version %s did not reach every server in publish.timeout", self._final)
        if published or now >= self._deadline:
            self._stop(f"the run is complete with version {self._final}", 0)
            self._deadline = now + self._config.run.stop_timeout

    def _release(self, worker: Worker, reason: str) -> None:
        tickets = self._buffer.release(worker.name) if self._buffer is not None and self._exit is None else []
        self._events.emit("worker.gone", worker=worker.name, reason=reason, tickets=len(tickets))

    # -- what the service says

    def _hand_out(self, now: float) -> None:
        """Tickets to the workers, the batch to the learner, the roster to the publisher."""
        if self._buffer is not None and self._exit is None:
            by_name = {worker.name: worker for worker in self._workers.live}
            for name, tickets in assign(self._buffer, list(by_name.values()), now).items():
                self._tell(by_name[name], Tickets(tickets=tuple(tickets)))
        if self._buffer is not None and self._asked is not None:
            self._deliver(self._buffer, self._asked)
        roster = Roster(servers=self._workers.servers)
        if roster != self._roster and self._to_publisher(roster):
            self._roster = roster

    def _deliver(self, buffer: Buffer, step: int) -> None:
        try:
            groups = buffer.take(step)
        except ValueError as error:
            self._stop(f"the learner lost its place: {error}", 1)
            return
        if groups is None or self._learner is None:
            return
        if self._delivered is None or self._delivered.step != step:
            self._delivered = self._record(buffer, step, groups)
        frames = [frame for stored in groups for frame in stored.frames]
        if self._router.send(self._learner, self._delivered, frames):
            self._asked = None

    def _record(self, buffer: Buffer, step: int, groups: tuple[Stored, ...]) -> BatchHeader:
        """Journal a new batch, and sum up the time since the last one."""
        if self._journal is not None:
            self._journal.append_batch(step, [stored.group_id for stored in groups])
        stats = BatchStats(
            tokens_generated=self._tokens,
            generator_busy=self._workers.busy(),
            groups=buffer.groups,
            bytes=buffer.bytes,
        )
        self._tokens = 0
        self._events.emit("batch", step=step, groups=len(groups), waiting=stats.groups, bytes=stats.bytes)
        return BatchHeader(step=step, groups=len(groups), stats=stats)

    def _acknowledge(self, version: PolicyVersion) -> None:
        if self._buffer is not None and self._buffer.acknowledge(version):
            self._events.emit("publish.acknowledged", version=version, slots=self._buffer.charged)

    def _tell(self, worker: Worker, message: Message) -> bool:
        """Send to a worker; one that cannot be reached is as good as silent. False then."""
        if self._router.send(worker.identity, message):
            return True
        if not worker.lost:
            worker.lost = True
            self._release(worker, "it does not take messages")
        return False

    def _to_publisher(self, message: Message) -> bool:
        return self._publisher is not None and self._router.send(self._publisher, message)

    def _stop(self, reason: str, code: int) -> None:
        """Tell every peer that it is over."""
        self._exit = code
        log.log(logging.ERROR if code == 1 else logging.INFO, "stop: %s", reason)
        self._events.emit("replay.stop", reason=reason, code=code)
        peers = [worker.identity for worker in self._workers.known]
        for identity in (*peers, self._learner, self._publisher):
            if identity is not None:
                self._router.send(identity, Stop(reason=reason[:4096]))


def _new_buffer(config: Config, start: PolicyVersion) -> Buffer:
    return Buffer(
        make_order(config.replay),
        start=start,
        last_step=config.run.steps,
        task=config.task.name,
        seed=config.run.seed,
        group_timeout=config.replay.group_timeout,
        max_attempts=config.replay.max_attempts,
    )
