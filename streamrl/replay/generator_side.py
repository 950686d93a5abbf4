"""The service's side towards the generator workers: who they are, their tickets, their groups, their answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from streamrl.replay.durable import Frame
from streamrl.replay.refusals import DuplicateGroup, GroupRefused
from streamrl.replay.run_parts import RunParts
from streamrl.replay.workers import Worker, assign
from streamrl.stream.messages import (
    MAX_REASON,
    Accepted,
    Applied,
    Asleep,
    Bye,
    Credit,
    Evaluated,
    GaveUp,
    Heartbeat,
    Hello,
    Introduce,
    MalformedMessage,
    Message,
    Mismatch,
    PublishFailed,
    Refused,
    TicketKey,
    Tickets,
)
from streamrl.types import Group

log = logging.getLogger(__name__)


class GeneratorSide:
    """All workers of a run. `now` is the time of the peers, in seconds (`replay/peer_time.py`)."""

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._accepted: deque[tuple[int, str, Accepted]] = deque()  # (mark, worker, answer that waits for it)

    def handle_hello(self, identity: bytes, hello: Hello, now: float) -> str | None:
        """A worker comes, or comes back: what it still has stays its own, what a former process had is lost.

        Returns why it cannot take part; None where it can, or must wait for its name.
        """
        run = self._run
        holder = run.workers.rival(hello.name, identity, now)
        if holder is not None and holder.outlives:
            return (
                f"a worker {hello.name} is at work already; allowed: one of each name, so another --index for this one"
            )
        # The holder of the name that speaks keeps it, one that cannot be reached has died. As long as neither is known
        # the new one is nobody, is asked again who it is, and says Hello again.
        if holder is not None and run.send(holder.identity, Introduce()):
            return None
        run.peers.introduced(identity)
        replaced = run.workers.join(hello.name, identity, hello.servers, now)
        run.buffer.adopt(hello.name, hello.tickets, now)
        if replaced:
            gone = set(run.buffer.tickets(hello.name)) - set(hello.tickets)
            self._return_tickets(hello.name, gone, "its worker does not have it")
            run.events.emit("worker.replaced", worker=hello.name, tickets=len(gone))
        for server in hello.servers:
            run.acknowledge(server.version)
        return None

    def handle(self, worker: Worker, message: Message, now: float) -> None:
        """Any message but a Hello and a group. Raises MalformedMessage."""
        run = self._run
        match message:
            case Credit(capacity=capacity):
                worker.capacity = capacity
            case Heartbeat(tickets=tickets):
                worker.busy.record(message, now)
                worker.drafts.record(message)
                run.buffer.extend(worker.name, tickets, now)
            case Applied() | PublishFailed() | Mismatch() if message.server not in worker.servers:
                raise MalformedMessage(f"server {message.server} is not one of worker {worker.name}")
            case Applied(version=version) if run.admission.unknown(version, run.buffer):
                raise MalformedMessage(f"version {version}, which server {message.server} reports, was never announced")
            case Applied(server=server, version=version, pinned=pinned):
                run.workers.applied(worker, server, version, pinned=pinned)
                run.acknowledge(version)
                run.send_publisher(message)
            case Asleep(number=number):
                worker.asleep = number
            case Mismatch(server=server, version=version, metrics=metrics):
                run.delivery.mismatches.record(message)
                run.events.emit("mismatch.measured", server=server, version=version, metrics=metrics)
            case Evaluated(version=version, metrics=metrics):
                number = run.evaluations.record(message)
                run.events.emit("evaluated", worker=worker.name, number=number, version=version, metrics=metrics)
            case PublishFailed(server=server, version=version, reason=reason):
                worker.missed(server, version, run.buffer.began.incarnation if run.buffer.began else 0)
                run.events.emit("publish.failed", server=server, version=version, reason=reason)
                run.send_publisher(message)
            case GaveUp(reason=reason):
                run.give_up(reason)
            case Bye():
                run.workers.leave(worker)
                asked_to_end = worker.capacity == 0  # and it has drained
                released = run.buffer.release(worker.name, excused=asked_to_end) if run.phases.goes_on else []
                run.events.emit("worker.gone", worker=worker.name, tickets=len(released))
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a generator")

    def handle_group(self, worker: Worker, group: Group, frames: Sequence[Frame]) -> None:
        """A group: it is answered once its record is durable."""
        run = self._run
        answer = {"group_id": group.group_id, "attempt": group.attempt}
        try:
            if (problem := run.admission.problem(group, run.buffer)) is not None:
                run.buffer.fail(worker.name, group.group_id, group.attempt, problem)
                raise GroupRefused(problem)
            accepted = run.durable.complete(worker.name, group, frames)
        except DuplicateGroup:  # its Accepted was lost
            run.events.emit("group.duplicate", worker=worker.name, **answer)
        except GroupRefused as error:
            run.events.emit("group.refused", worker=worker.name, reason=str(error), **answer)
            run.send_worker(worker, Refused(reason=str(error)[:MAX_REASON], **answer))
            return
        else:
            run.delivery.accepted(group.tokens)
            if accepted is not None:
                run.events.emit("group.accepted", worker=worker.name, tokens=group.tokens, **answer)
        self._accepted.append((run.durable.mark, worker.name, Accepted(**answer)))

    def refuse_group(self, worker: Worker, ticket: TicketKey, reason: str) -> None:
        """A group that cannot be read: its ticket is issued again."""
        group_id, attempt = ticket
        try:
            self._run.buffer.fail(worker.name, group_id, attempt, reason)
        except GroupRefused as error:
            reason = f"{reason}; {error}"
        refused = Refused(group_id=group_id, attempt=attempt, reason=reason[:MAX_REASON])
        self._run.send_worker(worker, refused)

    def tick(self, now: float) -> None:
        """Workers that became silent, and tickets that were lost."""
        run = self._run
        for worker in run.workers.silent(now):
            run.events.emit("worker.silent", worker=worker.name)
        if not run.phases.goes_on:
            return
        run.buffer.expire(now)
        for ticket in run.buffer.exhausted():
            run.durable.give_up(ticket)
            run.events.emit("group.placeholders", group_id=ticket.group_id, attempt=ticket.attempt)
            log.warning("group %d is given up after attempt %d: placeholders", ticket.group_id, ticket.attempt - 1)

    def send_answers(self) -> None:
        """Accepted, for every group whose record is on the disk."""
        run = self._run
        while self._accepted and run.durable.is_durable(self._accepted[0][0]):
            _, name, answer = self._accepted.popleft()
            if receiver := run.workers.named(name):
                run.send_worker(receiver, answer)

    def send_tickets(self, now: float) -> None:
        """Every ticket that may be issued now."""
        run = self._run
        run.buffer.gate.tick(now, sum(worker.capacity for worker in run.workers.live))
        if not run.phases.goes_on or run.durable.full or run.buffer.required is None:
            return
        by_name = {worker.name: worker for worker in run.workers.live}
        for name, tickets in assign(run.buffer, list(by_name.values()), now).items():
            keys = [(ticket.group_id, ticket.attempt) for ticket in tickets]
            run.events.emit("tickets", worker=name, tickets=keys)
            if not run.send_worker(by_name[name], Tickets(tickets=tuple(tickets))):
                self._return_tickets(name, keys, "its worker cannot be reached", excused=True)

    def send_order(self) -> None:
        """Sleep, or Wake, to every worker that has not been sent the newest one."""
        sharing = self._run.sharing
        if sharing is None or not self._run.phases.goes_on:
            return
        for worker in self._run.workers.live:
            if worker.ordered != sharing.number and self._run.send_worker(worker, sharing.word):
                worker.ordered = sharing.number

    def _return_tickets(self, worker: str, tickets: Iterable[TicketKey], reason: str, *, excused: bool = False) -> None:
        """The worker does not have these: they are issued again at once. `excused`: it never had them."""
        for group_id, attempt in sorted(tickets):
            self._run.buffer.fail(worker, group_id, attempt, reason, excused=excused)
