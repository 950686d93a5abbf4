"""The replay service without its socket and its clock: every message goes to one of three sides, time passes in ticks.

    handle ──▶ generator side   tickets, groups          handle* ─▶ tick ─▶ handle* ─▶ tick ─▶ ... until `is_over`
           ──▶ learner side     batches, steps
           ──▶ publisher side   servers, versions

Nothing in it waits for a peer. What each may say is listed in `stream/messages.py`, the phases in `replay/phases.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamrl.config import Config
from streamrl.observe.events import Events
from streamrl.replay.admission import foreign
from streamrl.replay.durable import DurableBuffer, Frame
from streamrl.replay.generator_side import GeneratorSide
from streamrl.replay.learner_side import LearnerSide
from streamrl.replay.peer_time import PeerTime
from streamrl.replay.phases import Phase
from streamrl.replay.publisher_side import PublisherSide
from streamrl.replay.run_parts import RunParts, Send
from streamrl.stream.codec import decode_group, ticket_of
from streamrl.stream.messages import MAX_REASON, Bye, Hello, Introduce, MalformedMessage, Message, Stop, decode
from streamrl.stream.sockets import Received
from streamrl.types import Group

log = logging.getLogger(__name__)


class Core:
    """Driven by `replay/service.py`, or by a test or a simulation with a clock and peers of its own.

    Usage:
        core = Core(config, durable, router.send, events, now=0.0)
        while not core.is_over():
            while (received := router.receive(core.longest_wait(clock(), most=0.2))) is not None:
                core.handle(received, clock())
            core.tick(clock(), emptied=True)
    """

    def __init__(self, config: Config, durable: DurableBuffer, send: Send, events: Events, now: float) -> None:
        """`now`: seconds on the clock of the journal, as in every call."""
        self._run = RunParts(config, durable, send, events)
        self._time = PeerTime(now, config.replay.lease)
        self._generators = GeneratorSide(self._run)
        self._learner = LearnerSide(self._run, self._time.now)
        self._publisher = PublisherSide(self._run)
        self.malformed = 0  # messages refused as malformed

    @classmethod
    def in_memory(cls, config: Config, send: Send, now: float = 0.0) -> Core:
        """Of a run without a folder: nothing is recovered, no journal is written, no event is logged."""
        events = Events()
        return cls(config, DurableBuffer(config, None, events), send, events, now)

    def recover(self, events: Iterable[Mapping[str, Any]]) -> None:
        """What the journal does not know: `events` are the records of the services before this one, in order.

        To be called before any message. Raises ValueError for a version that is none.
        """
        self._run.evaluations.recover(events)

    @property
    def run_id(self) -> str:
        """The run that a Hello must name."""
        return self._run.durable.run.id

    @property
    def code(self) -> int:
        """Exit code, once the run is over."""
        return self._run.phases.code

    def is_over(self) -> bool:
        """Has everybody been sent the end, and left, or had the time for it?"""
        return self._run.phases.is_over(self._time.now, anyone=bool(self._run.workers.live))

    def interrupt(self, reason: str, code: int) -> None:
        """A signal ends the service, with exit code `code`."""
        self._run.phases.interrupt(code)
        self._run.send_stop(f"the replay service was ended by {reason}")

    def longest_wait(self, now: float, most: float) -> float:
        """Seconds until a tick is due without a message, `most` at most."""
        due = min(self._run.durable.due_at - now, self._run.buffer.gate.due_at - self._time.now)
        return most if self._time.catches_up else min(most, max(0.0, due))

    # -- messages

    def handle(self, received: Received, now: float) -> None:
        """What a peer has sent."""
        identity, frames, run = received.peer, received.frames, self._run
        try:
            if received.problem:
                raise MalformedMessage(received.problem)
            is_worker = run.workers.knows(identity)
            known = is_worker or run.peers.knows(identity)
            message = None if len(frames) == 2 and (is_worker or not known) else _only_message(frames)
            if known and not isinstance(message, Hello):
                self._ask_again(identity, received.missed)
            if message is not None:
                self.handle_message(identity, message, now)
            elif known:
                self.handle_group(identity, decode_group(*frames), frames)
            else:
                ticket_of(frames[0])  # raises where it is no group
                self._handle_stranger(identity)
        except MalformedMessage as error:
            self._refuse_malformed(identity, error)

    def handle_message(self, identity: bytes, message: Message, now: float) -> None:
        """A message of a peer, decoded. Raises MalformedMessage for one that is not its to send."""
        run = self._run
        worker = run.workers.touch(identity, self._time.now)
        if isinstance(message, Hello):
            self._handle_hello(identity, message)
        elif worker is not None:
            self._generators.handle(worker, message, self._time.now)
        elif identity == run.peers.learner:
            self._learner.handle(message, self._time.now, now)
        elif run.peers.knows(identity):
            self._publisher.handle(message)
        else:
            self._handle_stranger(identity, message)

    def handle_group(self, identity: bytes, group: Group, frames: Sequence[Frame]) -> None:
        """A group of a worker, decoded. A batch takes `frames` along as they are."""
        if (worker := self._run.workers.touch(identity, self._time.now)) is not None:
            self._generators.handle_group(worker, group, frames)

    def _handle_stranger(self, identity: bytes, message: Message | None = None) -> None:
        """A peer of a former service, or of nobody: it is asked who it is."""
        if not self._run.phases.goes_on:
            self._send_over(identity)
        elif not isinstance(message, Bye):
            self._ask(identity)

    def _ask_again(self, identity: bytes, missed: int) -> None:
        """Ask a peer of which `missed` words were lost what it said, until it says Hello."""
        if missed:
            self._run.events.emit("replay.missed", peer=identity.decode(errors="replace"), messages=missed)
        if missed or self._run.peers.owes_hello(identity):
            self._ask(identity)

    def _ask(self, identity: bytes) -> None:
        if self._run.peers.to_ask(identity, self._time.now):
            self._run.send(identity, Introduce())

    def _handle_hello(self, identity: bytes, hello: Hello) -> None:
        run, now = self._run, self._time.now
        run.events.emit("replay.hello", peer=hello.role, name=hello.name, version=hello.version)
        problem = foreign(hello, run.durable.run)
        if problem is None and not run.phases.goes_on:
            self._send_over(identity)
        elif problem is None and hello.role == "generator":
            problem = self._generators.handle_hello(identity, hello, now)
        elif problem is None and hello.role == "publisher":
            self._publisher.handle_hello(identity)
        elif problem is None:
            problem = self._learner.handle_hello(identity, hello, now)
        if problem is not None:
            self._refuse_peer(identity, hello, problem)

    def _send_over(self, identity: bytes) -> None:
        """To a peer that comes too late."""
        self._run.send(identity, Stop(reason="the run is over", failed=self._run.phases.has_failed))

    def _refuse_peer(self, identity: bytes, hello: Hello, reason: str) -> None:
        """It cannot take part, and ends; the run goes on without it."""
        if self._run.peers.to_complain(identity, self._time.now):
            log.warning("refused: %s", reason)
            self._run.events.emit("replay.refused", peer=hello.role, name=hello.name, run=hello.run, reason=reason)
        self._run.send(identity, Stop(reason=reason[:MAX_REASON], refused=True))

    def _refuse_malformed(self, identity: bytes, error: MalformedMessage) -> None:
        """Count and log it; answer where an answer helps. A group's ticket is issued again."""
        run, now = self._run, self._time.now
        self.malformed += 1
        if run.peers.to_complain(identity, now):
            log.warning("malformed message from %r refused: %s", identity, error.reason)
            run.events.emit("replay.malformed", peer=identity.decode(errors="replace"), reason=error.reason)
        worker = run.workers.touch(identity, now)
        if worker is not None and error.ticket is not None:
            self._generators.refuse_group(worker, error.ticket, error.reason)
        elif worker is None and not run.peers.knows(identity):
            run.send(identity, Stop(reason=f"refused: {error.reason}"[:MAX_REASON], refused=True))

    # -- time

    def tick(self, now: float, *, emptied: bool) -> None:
        """Do what is due, and hand out tickets, a batch, the roster. `emptied`: every message that came was handled."""
        run, peers_now = self._run, self._time.tick(now, emptied=emptied)
        self._generators.tick(peers_now)
        if (waited := run.evaluations.tick(run.workers.servers, now)) is not None:
            run.events.emit("publish.waited", seconds=round(waited, 6), reason="every server was being evaluated")
        run.durable.tick(now)
        self._generators.send_answers()
        self._learner.send_progress(peers_now)
        if run.phases.phase is Phase.FINISHING:
            self._finish(peers_now)
        elif run.phases.phase is Phase.SERVING:
            self._learner.tick(peers_now)
        self._generators.send_tickets(peers_now)
        self._learner.send_batch(now)
        self._generators.send_order()
        self._publisher.send_roster()
        run.repeat_stop()

    def _finish(self, now: float) -> None:
        """The run ends when every server has the last version, and it is evaluated, or at the deadlines of both."""
        run, final = self._run, self._run.phases.final
        assert final is not None
        everywhere = run.workers.all_at(final)
        self._learner.lend_devices()
        if not run.phases.is_published(now, everywhere=everywhere, evaluating=run.workers.pinned):
            return
        if everywhere:
            run.events.emit("publish.complete", version=final)
        else:
            log.warning("version %s did not reach every server in publish.timeout", final)
        self._learner.send_evaluations()
        run.phases.complete(now)
        run.send_stop(f"the run is complete with version {final}")


def _only_message(frames: list[memoryview]) -> Message:
    if len(frames) != 1:
        raise MalformedMessage(f"{len(frames)} frames, one is expected here")
    return decode(frames[0])
