"""A server's weights, as the publisher knows them: which version it has, and how far the newest one has come.

No I/O and no clock: the publisher (`publish/publisher.py`) passes on what the replay service says, and asks which
servers get a version now and whether a transfer is still worth waiting for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from msgspec.structs import replace

from streamrl.machine import Machine
from streamrl.stream.messages import Applied, PublishFailed, ServerState
from streamrl.types import PolicyVersion

# Seconds before a failed server is tried again; doubled each time, up to publish.timeout.
FIRST_PAUSE = 1.0

# Why an attempt cannot succeed whose service does not know of it.
FORGOTTEN = "what was said of it may be lost with a former replay service"

_NONE = PolicyVersion(0)


class State(Enum):
    IDLE = auto()  # nothing is on its way to it
    PREPARING = auto()  # the source prepares a version for it
    SENDING = auto()  # a version was announced to it, and the transport sends the bytes
    WAITING = auto()  # the bytes are sent; it has not reported the version
    BACKING_OFF = auto()  # the last attempt has failed; the next one waits for the end of a pause
    GONE = auto()  # no live worker has it


class Event(Enum):
    BEGIN = auto()
    PREPARED = auto()
    SENT = auto()
    APPLIED = auto()
    FAILED = auto()  # refused, evaluated, out of time, or unknown to a service that was started again
    PAUSE_OVER = auto()
    NEWER = auto()  # a newer version was announced, and the server has not failed several times in a row
    LEFT = auto()
    RETURNED = auto()


TRANSITIONS = {
    (State.IDLE, Event.BEGIN): State.PREPARING,
    (State.IDLE, Event.LEFT): State.GONE,
    (State.PREPARING, Event.PREPARED): State.SENDING,
    (State.PREPARING, Event.FAILED): State.BACKING_OFF,
    (State.PREPARING, Event.LEFT): State.GONE,
    (State.SENDING, Event.SENT): State.WAITING,
    (State.SENDING, Event.FAILED): State.BACKING_OFF,
    (State.SENDING, Event.LEFT): State.GONE,
    (State.WAITING, Event.APPLIED): State.IDLE,
    (State.WAITING, Event.FAILED): State.BACKING_OFF,
    (State.WAITING, Event.LEFT): State.GONE,
    (State.BACKING_OFF, Event.PAUSE_OVER): State.IDLE,
    (State.BACKING_OFF, Event.NEWER): State.IDLE,
    (State.BACKING_OFF, Event.LEFT): State.GONE,
    # A server that leaves and comes back all the time is tried no more often than one that stays and fails.
    (State.GONE, Event.RETURNED): State.BACKING_OFF,
}

SERVER_WEIGHTS = Machine("A server's weights", TRANSITIONS, State.IDLE)


@dataclass(slots=True)
class ServerWeights:
    """One server. Times are in seconds on the caller's clock."""

    reported: ServerState  # by the roster, or by the server itself
    timeout: float  # publish.timeout: seconds of an attempt, and of the longest pause
    state: State = State.IDLE
    attempt: int | None = None  # number of its newest Publish
    version: PolicyVersion = _NONE  # of that Publish
    deadline: float = 0.0  # of its time in that attempt
    refusal: str | None = None  # why that attempt cannot succeed
    stale: bool = False  # its process has ended: what the transport shares with it leads nowhere
    pause: float = 0.0  # seconds, after the last failure; 0 after a success
    retry_at: float = float("-inf")
    failures: int = 0  # of its own, in a row, of whatever versions

    @property
    def name(self) -> str:
        return self.reported.name

    @property
    def is_open(self) -> bool:
        """Is an attempt under way?"""
        return self.state is State.PREPARING or self.has_time

    @property
    def has_time(self) -> bool:
        """Does its own part of an attempt run, which `timeout` bounds?"""
        return self.state in (State.SENDING, State.WAITING)

    @property
    def has_version(self) -> bool:
        """Has it reported the version of its newest attempt, or a newer one?"""
        return self.reported.version >= self.version

    def is_due(self, version: PolicyVersion, now: float) -> bool:
        """May an attempt with `version` begin? Ends a pause that is over."""
        if self.state is State.BACKING_OFF and self.retry_at <= now:
            self._move(Event.PAUSE_OVER)
        return self.state is State.IDLE and self.reported.version < version and not self.reported.pinned

    def begin(self, version: PolicyVersion, attempt: int) -> bool:
        """Begin an attempt. True where the transport must first drop what it shares with a former process."""
        self._move(Event.BEGIN)
        self.version, self.attempt, self.refusal = version, attempt, None
        stale, self.stale = self.stale, False
        return stale

    def prepared(self, now: float) -> None:
        """The source has prepared the version: the server's time begins."""
        if self.state is State.PREPARING:
            self.deadline = now + self.timeout
            self._move(Event.PREPARED)

    def sent(self) -> None:
        """The transport has sent everything."""
        if self.state is State.SENDING:
            self._move(Event.SENT)
        self._settle()

    def report(self, reported: ServerState) -> None:
        """The server is there and has these weights. Older ones than before: another process has its name."""
        if self.state is State.GONE:
            self._move(Event.RETURNED)
        self.stale |= reported.version < self.reported.version
        self.reported = reported
        self._settle()

    def leave(self, now: float) -> None:
        """No live worker has it any more; that is the end of its attempt, too."""
        if self.state is State.GONE:
            return
        if self.is_open:
            self._back_off(now)
        self.stale = True
        self._move(Event.LEFT)

    def problem(self, now: float) -> str | None:
        """Why its attempt cannot succeed any more; None while it can, and once it has."""
        if self.state is State.IDLE:
            return None
        if self.refusal is not None:
            return f"{self.name}: {self.refusal}"
        if not self.is_open:
            return f"{self.name} has left"
        if self.reported.pinned and not self.has_version:
            return f"{self.name} is being evaluated"
        if self.has_time and now > self.deadline:
            return f"{self.name} did not finish in publish.timeout={self.timeout:g} s"
        return None

    def fail(self, now: float) -> None:
        """The attempt is given up; where the server has left, it was already."""
        if self.is_open:
            self._back_off(now)
            self._move(Event.FAILED)

    def forgive(self) -> None:
        """A newer version is tried at once, unless attempts in a row have failed: each may have taken `timeout`."""
        if self.failures > 1:
            return
        self.pause, self.retry_at = 0.0, float("-inf")
        if self.state is State.BACKING_OFF:
            self._move(Event.NEWER)

    def _settle(self) -> None:
        if self.state is State.WAITING and self.has_version:
            self._move(Event.APPLIED)
            self.pause, self.failures = 0.0, 0

    def _back_off(self, now: float) -> None:
        self.pause = min(2 * self.pause, self.timeout) if self.pause else FIRST_PAUSE
        self.retry_at = now + self.pause
        self.failures += self.has_time  # what the source cannot do is no failure of the server's

    def _move(self, event: Event) -> None:
        self.state = SERVER_WEIGHTS.next(self.state, event)


class Servers:
    """All servers that the replay service has ever listed.

    >>> servers = Servers(timeout=60.0)
    >>> servers.handle_roster([ServerState(name="server-0", version=PolicyVersion(3))], now=0.0)
    >>> [server.name for server in servers.due(PolicyVersion(4), now=0.0)]
    ['server-0']
    """

    def __init__(self, timeout: float) -> None:
        """`timeout`: publish.timeout, in seconds."""
        self._timeout = timeout
        self._known = False  # the present service has listed the servers
        self._by_name: dict[str, ServerWeights] = {}
        self._attempts = 0

    def handle_roster(self, roster: Iterable[ServerState], now: float) -> None:
        """The servers of the live workers."""
        present: dict[str, ServerWeights] = {}
        for reported in roster:
            server = self._by_name.pop(reported.name, None) or ServerWeights(reported, self._timeout)
            server.report(reported)
            present[reported.name] = server
        for server in self._by_name.values():
            server.leave(now)
        self._by_name = present | self._by_name
        self._known = True

    def handle_applied(self, message: Applied) -> None:
        """A server reports its weights, and whether it keeps them for an evaluation."""
        server = self._by_name.get(message.server)
        if server is not None and server.state is not State.GONE:
            server.report(replace(server.reported, version=message.version, pinned=message.pinned))

    def handle_failed(self, message: PublishFailed) -> None:
        """A server did not get a version. What becomes of a former attempt is no news."""
        server = self._by_name.get(message.server)
        if server is not None and server.attempt == message.attempt:
            server.refusal = message.reason

    def forgotten(self) -> None:
        """The service did not know the publisher: its servers are known once it tells them."""
        self._known = False
        for server in self._by_name.values():
            if server.is_open:
                server.refusal = FORGOTTEN

    def announced(self) -> None:
        """There is a newer version."""
        for server in self._by_name.values():
            server.forgive()

    def due(self, version: PolicyVersion, now: float) -> list[ServerWeights]:
        """The servers that get `version` now. A round may end before the last one: those that hang come behind the
        others, by failures in a row, and those that a round has left out come first.
        """
        due = [server for server in self._by_name.values() if server.is_due(version, now)]
        return sorted(due, key=lambda server: (server.failures, server.reported.version))

    def begin(self, server: ServerWeights, version: PolicyVersion) -> bool:
        """As `ServerWeights.begin`, with a number that no other attempt has."""
        self._attempts += 1
        return server.begin(version, self._attempts)

    def have(self, version: PolicyVersion) -> bool:
        """Do all servers of the roster have `version` or a newer one, as far as is known?"""
        present = [server for server in self._by_name.values() if server.state is not State.GONE]
        return self._known and all(server.reported.version >= version for server in present)

    @property
    def have_time(self) -> bool:
        """Does one of them have its time of an attempt?"""
        return any(server.has_time for server in self._by_name.values())
