"""Who generates: the live workers, their credit, their servers' versions, and who gets the next ticket.

Pure, like the buffer: messages and times come in as arguments.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from msgspec.structs import replace

from streamrl.replay.buffer import Buffer
from streamrl.stream.messages import Heartbeat, ServerState
from streamrl.types import PolicyVersion, Ticket

# Heartbeats without a word after which a worker gets no more tickets and its servers are not waited for; one is easily
# late on a machine that is loading weights, ten in a row are not.
SILENCE = 10


# Seconds after which everything has been received that a dead worker had left in the service's queue.
SETTLED = 0.5


class BusyMeter:
    """The share of time with a request running, between heartbeats."""

    def __init__(self) -> None:
        self._from: tuple[float, float] | None = None  # (time, busy seconds) where the interval began
        self._to: tuple[float, float] | None = None
        self._last = 0.0

    def record(self, heartbeat: Heartbeat, now: float) -> None:
        self._to = (now, heartbeat.busy)
        self._from = self._from or self._to

    def fraction(self) -> float:
        """Since the last call; the last value again when no heartbeat came in between."""
        if self._from is None or self._to is None or self._to[0] <= self._from[0]:
            return self._last
        share = (self._to[1] - self._from[1]) / (self._to[0] - self._from[0])
        self._last, self._from = min(1.0, max(0.0, share)), self._to
        return self._last


class DraftMeter:
    """Passes of the policy over drafts, and the drafts that were kept in them, between heartbeats."""

    def __init__(self) -> None:
        self._told = self._taken = (0, 0)

    def record(self, heartbeat: Heartbeat) -> None:
        self._told = (heartbeat.verified, heartbeat.accepted)

    def take(self) -> tuple[int, int]:
        """Since the last call."""
        since = self._told[0] - self._taken[0], self._told[1] - self._taken[1]
        self._taken = self._told
        return max(0, since[0]), max(0, since[1])


@dataclass(slots=True)
class Worker:
    """One generator worker, as far as the service knows it."""

    name: str
    identity: bytes  # of its socket
    last_seen: float  # seconds, on the service's clock
    servers: dict[str, ServerState]
    failed: dict[str, PolicyVersion] = field(default_factory=dict)  # servers that missed a version
    capacity: int = 0
    rival: tuple[bytes, float] | None = None  # another process of its name, and when that said Hello first
    ordered: int | None = None  # number of the last Sleep or Wake that it was sent, in a shared placement
    asleep: int | None = None  # number of the Sleep that it has answered
    lost: bool = False  # silent for too long; a word from it brings it back, and its tickets last as their leases do
    busy: BusyMeter = field(default_factory=BusyMeter)
    drafts: DraftMeter = field(default_factory=DraftMeter)

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest weights on a server that can be trusted with a ticket."""
        healthy = [state.version for name, state in self.servers.items() if name not in self.failed]
        return max(healthy, default=None)

    @property
    def outlives(self) -> bool:
        """Has it spoken since its rival came?"""
        return self.rival is not None and self.last_seen > self.rival[1] + SETTLED

    def applied(self, server: str, version: PolicyVersion, *, pinned: bool = False) -> None:
        """One of its servers reports its weights, and whether it keeps them for an evaluation.

        Weights of a later incarnation end a failure however low their step: the learner was restored behind it.
        """
        self.servers[server] = replace(self.servers[server], version=version, pinned=pinned)
        missed = self.failed.get(server)
        if missed is not None and (version >= missed or version.incarnation > missed.incarnation):
            del self.failed[server]

    def missed(self, server: str, version: PolicyVersion, incarnation: int) -> None:
        """One of its servers did not get `version`; that is of no concern to a learner of a later `incarnation`."""
        if version.incarnation >= incarnation:
            self.failed[server] = version

    def follow(self, incarnation: int) -> None:
        """A learner of this incarnation has begun: the versions of former ones are published no more."""
        self.failed = {server: version for server, version in self.failed.items() if version.incarnation >= incarnation}


class Workers:
    """The workers of a run, by name and by the identity of their sockets."""

    def __init__(self, heartbeat: float) -> None:
        """`heartbeat` is the seconds between two heartbeats of a worker."""
        self._silence = SILENCE * heartbeat
        self._by_name: dict[str, Worker] = {}
        self._by_identity: dict[bytes, Worker] = {}
        self._servers: tuple[ServerState, ...] | None = None  # of the live ones; None after a change
        self._all_live_until = float("-inf")  # nobody becomes lost before

    @property
    def known(self) -> list[Worker]:
        """Every worker that said Hello and not Bye, the lost ones included."""
        return list(self._by_name.values())

    @property
    def live(self) -> list[Worker]:
        """Those of them that reported lately."""
        return [worker for worker in self._by_name.values() if not worker.lost]

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """Every server of a live worker."""
        if self._servers is None:
            self._servers = tuple(state for worker in self.live for state in worker.servers.values())
        return self._servers

    @property
    def pinned(self) -> bool:
        """Is a server being evaluated?"""
        return any(state.pinned for state in self.servers)

    def join(self, name: str, identity: bytes, servers: tuple[ServerState, ...], now: float) -> Worker | None:
        """A Hello. Returns the worker of the same name that it replaces, if that was another process."""
        states = {state.name: state for state in servers}
        self._servers = None
        former = self._by_identity.get(identity)
        if former is not None and former.name != name:  # a process is one worker
            self.leave(former)
        before = self._by_name.get(name)
        if before is not None and before.identity == identity:
            before.servers, before.last_seen, before.lost = states, now, False
            before.ordered = before.asleep = None
            before.failed = {server: version for server, version in before.failed.items() if server in states}
            return None
        if before is not None:
            self._by_identity.pop(before.identity, None)
        worker = Worker(name, identity, now, states)
        self._by_name[name] = self._by_identity[identity] = worker
        return before

    def rival(self, name: str, identity: bytes, now: float) -> Worker | None:
        """The worker of this name that another process still is, as far as is known; None: the name is free."""
        holder = self._by_name.get(name)
        if holder is None or holder.identity == identity or holder.lost:
            return None
        if holder.rival is None or holder.rival[0] != identity:
            holder.rival = identity, now
        return holder

    def knows(self, identity: bytes) -> bool:
        return identity in self._by_identity

    def touch(self, identity: bytes, now: float) -> Worker | None:
        """A word from this peer: its worker, which lives. None for a peer that is no worker."""
        worker = self._by_identity.get(identity)
        if worker is not None:
            worker.last_seen = now
            if worker.lost:
                worker.lost, self._servers = False, None
        return worker

    def lose(self, worker: Worker) -> None:
        """It is silent, or cannot be reached."""
        worker.lost, self._servers = True, None

    def applied(self, worker: Worker, server: str, version: PolicyVersion, *, pinned: bool) -> None:
        """A server of this worker reports its weights."""
        worker.applied(server, version, pinned=pinned)
        self._servers = None

    def leave(self, worker: Worker) -> None:
        """A Bye."""
        self._servers = None
        self._by_name.pop(worker.name, None)
        self._by_identity.pop(worker.identity, None)

    def follow(self, incarnation: int) -> None:
        """A learner of this incarnation has begun, at whatever step."""
        for worker in self.known:
            worker.follow(incarnation)

    def silent(self, now: float) -> list[Worker]:
        """Workers that became lost now."""
        if now <= self._all_live_until:
            return []
        fresh = [worker for worker in self.live if now - worker.last_seen > self._silence]
        for worker in fresh:
            self.lose(worker)
        self._all_live_until = self._silence + min((worker.last_seen for worker in self.live), default=now)
        return fresh

    def all_at(self, version: PolicyVersion) -> bool:
        """Does every server of a live worker generate with `version` or newer? Failed ones are not waited for."""
        return all(
            state.version >= version and state.version.incarnation == version.incarnation
            for worker in self.live
            for name, state in worker.servers.items()
            if name not in worker.failed
        )

    def named(self, name: str) -> Worker | None:
        """The worker of this name, lost or not."""
        return self._by_name.get(name)

    def owner(self, server: str) -> Worker | None:
        """The live worker that commands this server."""
        return next((worker for worker in self.live if server in worker.servers), None)

    def busy(self) -> float:
        """Mean busy fraction of the live workers since the last call."""
        fractions = [worker.busy.fraction() for worker in self.live]
        return sum(fractions) / len(fractions) if fractions else 0.0

    def drafts(self) -> tuple[int, int]:
        """Passes over drafts, and the drafts that were kept, of the live workers since the last call."""
        each = [worker.drafts.take() for worker in self.live]
        return sum(verified for verified, _ in each), sum(accepted for _, accepted in each)


def assign(buffer: Buffer, workers: list[Worker], now: float) -> dict[str, list[Ticket]]:
    """Issue every ticket that may be issued now, by name of the worker that gets it.

    A worker takes part while its credit lasts and its newest trusted weights suffice for the next ticket.
    Of those, the one with the smallest share of its credit in use gets it, so that the groups of a step
    spread over all servers instead of queueing at the first.
    """
    granted: dict[str, list[Ticket]] = {}
    ready = [
        (held / worker.capacity, worker.name, worker.capacity, newest)
        for worker in workers
        if (newest := worker.newest) is not None and worker.capacity > (held := buffer.held(worker.name))
    ]
    heapq.heapify(ready)
    while ready and buffer.required is not None:
        _, name, capacity, newest = ready[0]
        ticket = buffer.issue(name, newest, now)
        if ticket is not None:
            granted.setdefault(name, []).append(ticket)
        if ticket is None or (held := buffer.held(name)) >= capacity:
            heapq.heappop(ready)
        else:
            heapq.heapreplace(ready, (held / capacity, name, capacity, newest))
    return granted
