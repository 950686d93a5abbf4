"""The service's side towards the learner: where it begins, the batches that it waits for, the steps that it makes."""

from __future__ import annotations

from streamrl.progress import ProgressWatch
from streamrl.replay.admission import impossible
from streamrl.replay.device_sharing import Owner
from streamrl.replay.phases import Phase
from streamrl.replay.run_parts import RunParts
from streamrl.replay.standstill import Herald, why_no_step
from streamrl.stream.messages import (
    Bye,
    Exited,
    Finished,
    GaveUp,
    Heartbeat,
    Hello,
    Lost,
    MalformedMessage,
    Measured,
    Message,
    Next,
    Progress,
    Quarantined,
    Saved,
    Welcome,
)


class LearnerSide:
    """The learner of a run. `now` is the time of the peers (`replay/peer_time.py`), `clock` that of the disk."""

    def __init__(self, run: RunParts, now: float) -> None:
        self._run = run
        self._watch = ProgressWatch(run.config, now)
        self._herald = Herald(run.config.progress_timeout)
        self._lost: int | None = None  # the step that the learner knows to be generated again

    def handle_hello(self, identity: bytes, hello: Hello, now: float) -> str | None:
        """A learner begins at its checkpoint. Returns why it cannot take part; None where it can."""
        assert hello.version is not None  # the message's own check
        run, step = self._run, hello.version.step
        run.peers.introduced(identity)
        if hello.ledger is not None:
            problem = impossible(hello.ledger, step, run.buffer, run.durable.run)
            if problem is not None:
                return f"{hello.name} starts at version {hello.version}, but {problem}"
        if self._herald.is_new_life(hello.version):
            self._watch.step(now)
        run.durable.begin(hello.version, hello.ledger, hello.limits)
        run.workers.follow(hello.version.incarnation)
        for server in run.workers.servers:
            run.acknowledge(server.version)
        run.delivery.forget()
        run.phases.learner_began()
        run.peers.learner = identity
        run.send(identity, Welcome(published=run.buffer.acknowledged))
        return None

    def handle(self, message: Message, now: float, clock: float) -> None:
        """Any message but a Hello. Raises MalformedMessage."""
        run = self._run
        match message:
            case Heartbeat():
                pass
            case Next(step=step):
                run.delivery.asked, self._lost = step, None
            case Quarantined(step=step, group_id=group_id, attempt=attempt, reason=reason):
                if run.buffer.quarantine(step, group_id, attempt, reason):
                    run.delivery.quarantined(step)
                    run.events.emit("group.quarantined", step=step, group_id=group_id, attempt=attempt, reason=reason)
            case Measured() | Progress():
                self._handle_trained(message, now)
            case Saved(version=version, oldest=oldest):
                run.events.emit("learner.saved", version=version, oldest=oldest)
                run.durable.saved(oldest, clock)
            case Finished(version=version):
                run.events.emit("learner.finished", version=version)
                run.phases.finished(version, now)
            case Exited(version=version, reason=reason):
                if run.phases.phase is Phase.SERVING:
                    run.events.emit("learner.exited", version=version, reason=reason)
                    run.phases.exited(now)
                    run.send_stop(reason)
            case GaveUp(reason=reason):
                run.give_up(reason)
            case Bye():
                run.delivery.forget()
                run.peers.learner = None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a learner")

    def _handle_trained(self, message: Measured | Progress, now: float) -> None:
        """A step is trained: first what its groups were like, then the step, which may move the adaptive bound."""
        run = self._run
        if isinstance(message, Measured):
            run.buffer.measured(message.step, message.ess)
            return
        self._watch.step(now)
        self._herald.step(message)
        run.events.emit("learner.progress", version=message.version)
        if (move := run.buffer.progress(message.version, message.signals)) is not None:
            moved = {"former": round(move.former, 3), "staleness": round(move.staleness, 3)}
            run.events.emit("bound.moved", step=move.step, **moved, reason=move.reason)

    def send_progress(self, now: float) -> None:
        """To the workers, who watch for steps as well."""
        if (progress := self._herald.due(now)) is not None:
            for worker in self._run.workers.live:
                self._run.send_worker(worker, progress)

    def tick(self, now: float) -> None:
        """A run that makes no step in run.progress_timeout is given up."""
        run = self._run
        if self._watch.is_over(now):
            why = why_no_step(run.workers, run.peers, run.delivery, run.sharing, full=run.durable.full)
            run.give_up(self._watch.line(why))

    def send_batch(self, clock: float) -> None:
        """The batch that the learner waits for, if it is complete and durable."""
        run = self._run
        learner = run.peers.learner
        if learner is None:
            return
        try:
            ready = run.delivery.ready(clock)
        except ValueError as error:
            run.fail(f"the learner lost its place: {error}")
            return
        if ready is None and (lost := run.delivery.lost) != self._lost:
            self._lost = lost
            if lost is not None:
                run.send(learner, Lost(step=lost))
        if not self._has_devices(complete=ready is not None) or ready is None:
            return
        if run.send(learner, *ready):
            run.delivery.asked = None
        else:  # it is gone, or will be asked who it is with its next message
            run.events.emit("learner.unreachable", step=run.delivery.asked)
            run.delivery.forget()
            run.peers.learner = None

    def _has_devices(self, *, complete: bool) -> bool:
        """May it train now? Where it shares its devices with the servers, they sleep first, or go on.

        A server that is being evaluated answers to the end.
        """
        run, sharing = self._run, self._run.sharing
        if sharing is None:
            return True
        if not complete:
            if run.delivery.asked is not None:
                if sharing.owner is Owner.HANDOVER:  # its batch is there no more
                    sharing.claim(run.workers.live)
                self.lend_devices()
            return False
        former = sharing.owner
        has_devices = not run.workers.pinned and sharing.claim(run.workers.live)
        if sharing.owner is not former:
            run.events.emit("devices", owner=sharing.owner.name.lower())
        return has_devices

    def lend_devices(self) -> None:
        """It waits for the servers, or has made its last step, which they may be asked to evaluate."""
        sharing = self._run.sharing
        if sharing is not None and sharing.owner is Owner.LEARNER:
            sharing.lend()
            self._run.events.emit("devices", owner=sharing.owner.name.lower())

    def send_evaluations(self) -> None:
        """Those that no batch has taken along: the run ends."""
        run = self._run
        if run.peers.learner is not None and (rest := run.evaluations.rest()):
            sent = [number for number, late in rest.items() if run.send(run.peers.learner, late)]
            run.events.emit("evaluated.late", numbers=sent)
