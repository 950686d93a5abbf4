"""The replay service: the one I/O shell round the buffer, its journal and the workers' roster.

One thread, one loop: hear what came, look at the clock, commit, hand out tickets, deliver the batch that the
learner waits for. Nothing in it waits for a peer. What each may say is listed in `stream/messages.py`.

    recovering ─▶ serving ──Finished──▶ last publish ──every server has it──▶ stopping ──Byes──▶ exit
                                        and evaluation ─ publish.timeout ────▶┘  └─ stop_timeout ─▶┘

It may be killed at any moment and started again, at the same address: the journal tells what was promised, and
every peer that it does not know is asked to introduce itself. The checkpoint that the learner's Hello names is
the authority on what is trained; whatever was consumed after it is delivered again.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import zmq

from streamrl.config import Config
from streamrl.observe.descriptors import raise_limit
from streamrl.observe.events import EventLog, event_path
from streamrl.progress import ProgressWatch
from streamrl.replay.admission import Admission, foreign, impossible
from streamrl.replay.buffer import DuplicateGroup, GroupRefused
from streamrl.replay.delivery import Delivery
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.journal import JournalDamaged
from streamrl.replay.listening import listen
from streamrl.replay.peer_time import PeerTime
from streamrl.replay.peers import Peers
from streamrl.replay.standstill import Herald, why_no_step
from streamrl.replay.workers import Worker, Workers, assign
from streamrl.stream.address import address_path, tell_address
from streamrl.stream.codec import decode_group, ticket_of
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.messages import (
    MAX_REASON,
    Accepted,
    Announce,
    Applied,
    Bye,
    Credit,
    Evaluated,
    Finished,
    GaveUp,
    Heartbeat,
    Hello,
    Introduce,
    MalformedMessage,
    Message,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Quarantined,
    Refused,
    Roster,
    Saved,
    Stop,
    TicketKey,
    Tickets,
    Welcome,
    decode,
)
from streamrl.stream.sockets import Router
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

BURST = 256
# messages between two looks at the clock, so that a flood of groups delays neither a batch nor an expiry.

TICK = 0.2
# seconds of the longest wait for a message; a signal or a deadline is noticed within it.


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
    except (OSError, zmq.ZMQError, JournalDamaged, KeysUnusable) as error:
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
        self._config = config
        self._events = events
        self._run_folder = run_folder
        self._clock = clock
        self._durable = DurableBuffer(config, run_folder, events, clock)
        self._buffer = self._durable.buffer
        self._router = router or listen(config, run_folder)
        self._time = PeerTime(clock(), config.replay.lease)
        self._workers = Workers(config.generate.heartbeat)
        self._peers = Peers()
        self._roster: Roster | None = None  # as the publisher knows it
        self._admission = Admission(config.generate.group_size)
        self._delivery = Delivery(self._durable, self._workers, events)
        self._watch = ProgressWatch(config, self._time.now)
        self._herald = Herald(config.progress_timeout)
        self._accepted: deque[tuple[int, str, Accepted]] = deque()  # (mark, worker, answer that waits for it)
        self._final: PolicyVersion | None = None
        self._deadline = float("inf")  # of the last publish, then of the Byes
        self._exit: int | None = None  # set when stopping
        self._interrupted: tuple[str, int] | None = None
        self.malformed = 0  # messages refused as malformed
        self.address = tell_address(run_folder, self._router.address, config.replay.host)
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
        code = 1 if self._exit is None else self._exit
        self._events.emit("replay.end", code=code, malformed=self.malformed, refused=refused, cut=cut)
        return code

    def turn(self) -> bool:
        """Hear, look at the clock, hand out: once. False at the end."""
        if self._ended(self._time.now):
            return False
        emptied = self._receive()
        now = self._time.look(self._clock(), emptied=emptied)
        self._on_time(now)
        self._hand_out(now)
        return True

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
        self._durable.commit(self._clock())
        self._durable.close()
        self._router.close()

    # -- what peers say

    def _receive(self) -> bool:
        """Hear what has come, at most `BURST` messages; wait for the first one until something is due.

        True where that was all. After a pause the sockets, too, need a moment to find what has come.
        """
        timeout = TICK if self._time.catches_up else min(TICK, max(0.0, self._durable.due_at - self._clock()))
        for _ in range(BURST):
            received = self._router.receive(timeout)
            if received is None:
                return True
            timeout = 0.0
            try:
                if received.problem:
                    raise MalformedMessage(received.problem)
                self._hear(received.peer, received.frames, received.missed, self._time.now)
            except MalformedMessage as error:
                self._refuse_malformed(received.peer, error, self._time.now)
        return False

    def _hear(self, identity: bytes, frames: list[memoryview], missed: int, now: float) -> None:
        worker = self._workers.hear(identity, now)
        known = worker is not None or self._peers.knows(identity)
        message = None if len(frames) == 2 and (worker or not known) else _only_message(frames)
        if isinstance(message, Hello):
            self._on_hello(identity, message, now)
            return
        if not known:
            self._on_stranger(identity, message, frames, now)
            return
        if missed:
            self._events.emit("replay.missed", peer=identity.decode(errors="replace"), messages=missed)
            self._ask(identity, now)
        if worker is not None and message is None:
            self._on_group(worker, frames)
        elif worker is not None and message is not None:
            self._on_worker(worker, message, now)
        elif identity == self._peers.learner and message is not None:
            self._on_learner(message, now)
        elif message is not None:
            self._on_publisher(message)

    def _on_stranger(self, identity: bytes, message: Message | None, frames: list[memoryview], now: float) -> None:
        """A peer of a former service, or of nobody: it is asked who it is."""
        if message is None:
            ticket_of(frames[0])  # raises where it is no group
        if self._exit is not None:
            self._router.send(identity, Stop(reason="the run is over", failed=self._exit == 1))
        elif not isinstance(message, Bye):
            self._ask(identity, now)

    def _ask(self, identity: bytes, now: float) -> None:
        if self._peers.to_ask(identity, now):
            self._router.send(identity, Introduce())

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        self._events.emit("replay.hello", peer=hello.role, name=hello.name, version=hello.version)
        if (problem := foreign(hello, self._durable.run)) is not None:
            self._refuse_peer(identity, hello, problem, now)
        elif self._exit is not None:
            self._router.send(identity, Stop(reason="the run is over", failed=self._exit == 1))
        elif hello.role == "generator":
            self._on_worker_hello(identity, hello, now)
        elif hello.role == "publisher":
            self._peers.introduced(identity)
            self._peers.publisher, self._roster = identity, None
        else:
            self._peers.introduced(identity)
            self._on_learner_hello(identity, hello, now)

    def _on_worker_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        """A worker comes, or comes back: what it still has stays its own, what a former process had is lost."""
        if self._waits_for_its_name(identity, hello, now):
            return
        self._peers.introduced(identity)
        replaced = self._workers.join(hello.name, identity, hello.servers, now)
        self._buffer.adopt(hello.name, hello.tickets, now)
        if replaced:
            gone = set(self._buffer.tickets(hello.name)) - set(hello.tickets)
            self._take_back(hello.name, gone)
            self._events.emit("worker.replaced", worker=hello.name, tickets=len(gone))
        for server in hello.servers:
            self._acknowledge(server.version)

    def _waits_for_its_name(self, identity: bytes, hello: Hello, now: float) -> bool:
        """Whether another process has the worker's name: one that speaks keeps it, one that cannot be reached has died.

        As long as neither is known the new one is nobody, is asked again who it is, and says Hello again.
        """
        holder = self._workers.rival(hello.name, identity, now)
        if holder is None:
            return False
        if holder.outlives:
            reason = (
                f"a worker {hello.name} is at work already; allowed: one of each name, so another --index for this one"
            )
            self._refuse_peer(identity, hello, reason, now)
            return True
        return self._router.send(holder.identity, Introduce())

    def _on_learner_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        assert hello.version is not None  # the message's own check
        run, step = self._durable.run, hello.version.step
        if hello.ledger is not None and (problem := impossible(hello.ledger, step, self._buffer, run)) is not None:
            self._refuse_peer(identity, hello, f"{hello.name} starts at version {hello.version}, but {problem}", now)
            return
        if self._herald.is_new_life(hello.version):
            self._watch.step(now)
        self._durable.begin(hello.version, hello.ledger, hello.limits)
        self._workers.follow(hello.version.incarnation)
        for server in self._workers.servers:
            self._acknowledge(server.version)
        self._delivery.forget()
        self._peers.learner, self._final = identity, None
        self._router.send(identity, Welcome(published=self._buffer.acknowledged))

    def _on_worker(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Credit(capacity=capacity):
                worker.capacity = capacity
            case Heartbeat(tickets=tickets):
                worker.busy.hear(message, now)
                self._buffer.extend(worker.name, tickets, now)
            case Applied() | PublishFailed() if message.server not in worker.servers:
                raise MalformedMessage(f"server {message.server} is not one of worker {worker.name}")
            case Applied(version=version) if self._admission.unknown(version, self._buffer):
                raise MalformedMessage(f"version {version}, which server {message.server} reports, was never announced")
            case Applied(server=server, version=version, pinned=pinned):
                worker.applied(server, version, pinned=pinned)
                self._acknowledge(version)
                self._to_publisher(message)
            case Evaluated(version=version, metrics=metrics):
                self._delivery.evaluations.hear(message)
                self._events.emit("evaluated", worker=worker.name, version=version, metrics=metrics)
            case PublishFailed(server=server, version=version, reason=reason):
                worker.missed(server, version, self._incarnation)
                self._events.emit("publish.failed", server=server, version=version, reason=reason)
                self._to_publisher(message)
            case GaveUp(reason=reason):
                self._give_up(reason)
            case Bye():
                self._workers.leave(worker)
                told = worker.capacity == 0  # it was told to end, and has drained
                released = self._buffer.release(worker.name, excused=told) if self._exit is None else []
                self._events.emit("worker.gone", worker=worker.name, tickets=len(released))
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a generator")

    def _on_learner(self, message: Message, now: float) -> None:
        match message:
            case Heartbeat():
                pass
            case Next(step=step):
                self._delivery.asked = step
            case Quarantined(step=step, group_id=group_id, attempt=attempt, reason=reason):
                if self._durable.buffer.quarantine(step, group_id, attempt, reason):
                    self._delivery.quarantined(step)
                    self._events.emit("group.quarantined", step=step, group_id=group_id, attempt=attempt, reason=reason)
            case Progress(version=version, ess=ess):
                self._watch.step(now)
                self._herald.step(message)
                self._events.emit("learner.progress", version=version)
                self._buffer.progress(version, ess)
            case Saved(version=version, oldest=oldest):
                self._events.emit("learner.saved", version=version, oldest=oldest)
                self._durable.saved(oldest, self._clock())
            case Finished(version=version):
                self._events.emit("learner.finished", version=version)
                self._final, self._deadline = version, now + self._config.publish.timeout
            case GaveUp(reason=reason):
                self._give_up(reason)
            case Bye():
                self._delivery.forget()
                self._peers.learner = None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a learner")

    def _on_publisher(self, message: Message) -> None:
        match message:
            case Heartbeat():
                pass
            case Announce(version=version):
                self._delivery.evaluations.announce(version)
                self._admission.announce(version)
                self._events.emit("publish.announced", version=version)
            case Publish(server=server, version=version, attempt=attempt):
                owner = self._workers.owner(server)
                if owner is None or not self._tell(owner, message):
                    reason = "no live worker owns this server"
                    failed = PublishFailed(server=server, version=version, reason=reason, attempt=attempt)
                    self._to_publisher(failed)
            case Bye():
                self._peers.publisher = None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a publisher")

    def _on_group(self, worker: Worker, frames: list[memoryview]) -> None:
        group = decode_group(*frames)
        answer = {"group_id": group.group_id, "attempt": group.attempt}
        try:
            if (problem := self._admission.problem(group, self._buffer)) is not None:
                self._buffer.fail(worker.name, group.group_id, group.attempt, problem)
                raise GroupRefused(problem)
            stored = self._durable.complete(worker.name, group, frames)
        except DuplicateGroup:  # its Accepted was lost
            self._events.emit("group.duplicate", worker=worker.name, **answer)
        except GroupRefused as error:
            self._events.emit("group.refused", worker=worker.name, reason=str(error), **answer)
            self._tell(worker, Refused(reason=str(error)[:MAX_REASON], **answer))
            return
        else:
            self._delivery.accepted(group.tokens)
            if stored is not None:
                self._events.emit("group.accepted", worker=worker.name, tokens=group.tokens, **answer)
        self._accepted.append((self._durable.mark, worker.name, Accepted(**answer)))

    def _refuse_malformed(self, identity: bytes, error: MalformedMessage, now: float) -> None:
        """Count and log it; answer where an answer helps. A group's ticket is issued again."""
        self.malformed += 1
        if self._peers.to_complain(identity, now):
            log.warning("malformed message from %r refused: %s", identity, error.reason)
            self._events.emit("replay.malformed", peer=identity.decode(errors="replace"), reason=error.reason)
        worker = self._workers.hear(identity, now)
        if worker is not None and error.ticket is not None:
            self._refuse_group(worker, *error.ticket, error.reason)
        elif worker is None and not self._peers.knows(identity):
            self._router.send(identity, Stop(reason=f"refused: {error.reason}"[:MAX_REASON], refused=True))

    def _refuse_peer(self, identity: bytes, hello: Hello, reason: str, now: float) -> None:
        """It cannot take part, and ends; the run goes on without having heard it."""
        if self._peers.to_complain(identity, now):
            log.warning("refused: %s", reason)
            self._events.emit("replay.refused", peer=hello.role, name=hello.name, run=hello.run, reason=reason)
        self._router.send(identity, Stop(reason=reason[:MAX_REASON], refused=True))

    def _refuse_group(self, worker: Worker, group_id: int, attempt: int, reason: str) -> None:
        try:
            self._buffer.fail(worker.name, group_id, attempt, reason)
        except GroupRefused as error:
            reason = f"{reason}; {error}"
        self._tell(worker, Refused(group_id=group_id, attempt=attempt, reason=reason[:MAX_REASON]))

    # -- what time brings

    def _on_time(self, now: float) -> None:
        for worker in self._workers.silent(now):
            self._events.emit("worker.silent", worker=worker.name)
        if self._exit is None:
            self._on_lost_tickets(now)
        if (waited := self._delivery.evaluations.look(self._workers.servers, self._clock())) is not None:
            self._events.emit("publish.waited", seconds=round(waited, 6), reason="every server was being evaluated")
        self._durable.tend(self._clock())
        while self._accepted and self._durable.is_durable(self._accepted[0][0]):
            _, name, answer = self._accepted.popleft()
            if receiver := self._workers.named(name):
                self._tell(receiver, answer)
        if (progress := self._herald.due(now)) is not None:
            for worker in self._workers.live:
                self._tell(worker, progress)
        if self._final is not None and self._exit is None:
            self._on_finished(self._final, now)
        elif self._exit is None and self._watch.is_over(now):
            self._give_up(self._watch.line(why_no_step(self._workers, self._peers, self._delivery, self._durable.full)))

    def _on_lost_tickets(self, now: float) -> None:
        self._buffer.expire(now)
        for ticket in self._buffer.exhausted():
            self._durable.give_up(ticket)
            self._events.emit("group.placeholders", group_id=ticket.group_id, attempt=ticket.attempt)
            log.warning("group %d is given up after attempt %d: placeholders", ticket.group_id, ticket.attempt)

    def _on_finished(self, final: PolicyVersion, now: float) -> None:
        """The run ends when every server has the last version, and it is evaluated, or at the deadlines of both."""
        if self._workers.pinned and now < self._deadline + self._config.evaluate.longest:
            return
        if published := self._workers.all_at(final):
            self._events.emit("publish.complete", version=final)
        elif now >= self._deadline:
            log.warning("version %s did not reach every server in publish.timeout", final)
        if published or now >= self._deadline:
            if self._peers.learner is not None:
                for late in self._delivery.evaluations.rest():
                    self._router.send(self._peers.learner, late)
            self._stop(f"the run is complete with version {final}", 0)
            self._deadline = now + self._config.run.stop_timeout

    # -- what the service says

    def _hand_out(self, now: float) -> None:
        """Tickets to the workers, the batch to the learner, the roster to the publisher."""
        if self._exit is None and not self._durable.full:
            by_name = {worker.name: worker for worker in self._workers.live}
            for name, tickets in assign(self._buffer, list(by_name.values()), now).items():
                keys = [(ticket.group_id, ticket.attempt) for ticket in tickets]
                self._events.emit("tickets", worker=name, tickets=keys)
                if not self._tell(by_name[name], Tickets(tickets=tuple(tickets))):
                    self._take_back(name, keys)
        if self._peers.learner is not None:
            self._deliver(self._peers.learner, now)
        roster = Roster(servers=self._workers.servers)
        if roster != self._roster and self._to_publisher(roster):
            self._roster = roster

    def _deliver(self, learner: bytes, now: float) -> None:
        try:
            ready = self._delivery.ready(self._clock())
        except ValueError as error:
            self._stop(f"the learner lost its place: {error}", 1)
            return
        if ready is None:
            return
        if self._router.send(learner, *ready):
            self._delivery.asked = None
        else:  # it is gone, or will be asked who it is at its next word
            self._events.emit("learner.unreachable", step=self._delivery.asked)
            self._delivery.forget()
            self._peers.learner = None

    def _take_back(self, worker: str, tickets: Iterable[TicketKey]) -> None:
        """The worker does not have these: they are issued again at once."""
        for group_id, attempt in sorted(tickets):
            self._buffer.fail(worker, group_id, attempt, "its worker does not have it")

    @property
    def _incarnation(self) -> int:
        """Of the learner that began last."""
        return self._buffer.began.incarnation if self._buffer.began else 0

    def _acknowledge(self, version: PolicyVersion) -> None:
        if self._buffer.acknowledge(version):
            self._events.emit("publish.acknowledged", version=version, slots=self._buffer.charged)

    def _tell(self, worker: Worker, message: Message) -> bool:
        """Send to a worker. One that cannot be reached is as good as silent; its tickets have their leases."""
        if self._router.send(worker.identity, message):
            return True
        if not worker.lost:
            worker.lost = True
            self._events.emit("worker.silent", worker=worker.name, reason="it does not take messages")
        return False

    def _to_publisher(self, message: Message) -> bool:
        return self._peers.publisher is not None and self._router.send(self._peers.publisher, message)

    def _give_up(self, reason: str) -> None:
        """End the run: whoever starts this service again would see it end the same way."""
        self._events.emit("gave_up", reason=reason)
        self._stop(reason, 1)

    def _stop(self, reason: str, code: int) -> None:
        """Tell every peer that it is over."""
        self._exit = code
        log.log(logging.ERROR if code == 1 else logging.INFO, "stop: %s", reason)
        self._events.emit("replay.stop", reason=reason, code=code)
        peers = [worker.identity for worker in self._workers.known]
        for identity in (*peers, self._peers.learner, self._peers.publisher):
            if identity is not None:
                self._router.send(identity, Stop(reason=reason[:MAX_REASON], failed=code == 1))


def _only_message(frames: list[memoryview]) -> Message:
    if len(frames) != 1:
        raise MalformedMessage(f"{len(frames)} frames, one is expected here")
    return decode(frames[0])
