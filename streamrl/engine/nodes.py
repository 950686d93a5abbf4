"""A server over several nodes: its worker is on the first one, and tells the others by a file where its ranks meet.

    worker      RUN/servers/server-3.json          Meeting: this start of the server, and the address of its ranks
    node 1, 2   RUN/servers/server-3-node-1.json   Attendance: which start the node has joined, and how that ended

A new Meeting is a new start of the whole server: every node ends what it has, and joins; what a node does is the table
below. Each side changes its `beat` as long as it lives. If its beat stops, it is lost to the other side. No clock of
another host is read.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from streamrl.machine import Machine
from streamrl.whole_files import write_whole

log = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two beats, and between two looks at those of the others

NODE_SILENCE = 30.0  # seconds without a beat after which a node is lost, and its server is started again

# TCP ports behind that of the meeting, which SGLang takes on its first node with attention's data parallelism.
FURTHER_PORTS = 6


class State(Enum):
    """Where a further node is in its life."""

    WAITING = auto()  # for the first start of its server
    JOINED = auto()  # its ranks are part of a start
    ENDED = auto()  # they are not any more; the next start is waited for
    LEFT = auto()  # so is nothing


class Event(Enum):
    """What happens to a further node."""

    MEET = auto()  # the worker calls to a start that this node has not joined
    END = auto()  # its ranks have ended, or the process before this one has
    LEAVE = auto()  # the worker has left for good, or the node is told to end


NODE = Machine(
    "A further node of a server",
    {
        (State.WAITING, Event.MEET): State.JOINED,
        (State.WAITING, Event.END): State.ENDED,
        (State.WAITING, Event.LEAVE): State.LEFT,
        (State.JOINED, Event.MEET): State.JOINED,
        (State.JOINED, Event.END): State.ENDED,
        (State.JOINED, Event.LEAVE): State.LEFT,
        (State.ENDED, Event.MEET): State.JOINED,
        (State.ENDED, Event.LEAVE): State.LEFT,
    },
    State.WAITING,
)


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker says."""

    start: str  # a name that no other start of a server has
    address: str  # HOST:PORT at which the ranks meet
    beat: int
    over: int | None = None  # exit code with which the worker has left for good: the nodes end with the same


class Attendance(msgspec.Struct, frozen=True, kw_only=True):
    """What a further node says."""

    start: str  # that it has joined; empty: none yet
    beat: int
    ended: str = ""  # why its part of that start has ended; empty: it goes on


@dataclass(frozen=True, slots=True)
class NodeOf:
    """The part of a server that one node has, as SGLang's arguments say it."""

    rank: int  # of the node
    count: int  # of nodes
    address: str  # at which all ranks meet

    @property
    def arguments(self) -> dict[str, object]:
        return {"nnodes": self.count, "node_rank": self.rank, "dist_init_addr": self.address}


class NodeLost(RuntimeError):
    """A server has lost one of its nodes; the text says which, and why."""


Said = TypeVar("Said", bound=Meeting | Attendance)


class Beats(Generic[Said]):
    """The file of another side, and for how long its beat has not changed. Times are monotonic seconds."""

    def __init__(self, path: Path, said: type[Said], now: float) -> None:
        self.last: Said | None = None
        self._path = path
        self._type: type[Said] = said
        self._changed = now

    def read(self, now: float) -> Said | None:
        """What it said last; None while there is no file."""
        said = _read(self._path, self._type)
        if said is not None and said != self.last:
            self.last, self._changed = said, now
        return self.last

    def silence(self, now: float) -> float:
        """Seconds since it said anything new."""
        return now - self._changed


class FurtherNodes:
    """The further nodes of one server, as its worker sees them. `leave` them.

    Usage:
        nodes = FurtherNodes(run_folder, "server-3", count=2)
        node = nodes.begin("10.0.0.3", port, now)  # NodeOf(rank=0, count=2, address='10.0.0.3:41231')
        nodes.check(now)  # again and again; raises NodeLost
    """

    def __init__(self, run_folder: Path, server: str, count: int) -> None:
        """`count`: nodes of the server, the worker's included."""
        self._path = meeting_path(run_folder, server)
        self._paths = {rank: attendance_path(run_folder, server, rank) for rank in range(1, count)}
        self._server = server
        self._count = count
        self._meeting = Meeting(start="", address="", beat=0)
        self._others: dict[int, Beats[Attendance]] = {}
        self._beaten = float("-inf")

    def begin(self, host: str, port: int, now: float) -> NodeOf:
        """A new start: every node is asked to the meeting at `port` of this `host`."""
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        self._meeting = Meeting(start=secrets.token_hex(8), address=address, beat=0)
        self._others = {rank: Beats(path, Attendance, now) for rank, path in self._paths.items()}
        self._beat(now)
        return NodeOf(rank=0, count=self._count, address=address)

    def check(self, now: float) -> None:
        """Say that the worker lives, and look for the others, as often as is due. Raises NodeLost."""
        if now - self._beaten < BEAT:
            return
        self._beat(now)
        for rank, beats in self._others.items():
            said = beats.read(now)
            if said is None or said.start != self._meeting.start:
                continue  # it has not joined yet: how long that may take is the server's own deadline
            if said.ended:
                raise NodeLost(f"node {rank} of {self._server}: {said.ended}")
            if beats.silence(now) > NODE_SILENCE:
                raise NodeLost(f"node {rank} of {self._server}: it has reported nothing for {NODE_SILENCE:g} s")

    def leave(self, code: int) -> None:
        """The worker ends for good, with this exit code, and with it the server."""
        if self._meeting.start:
            _write(self._path, msgspec.structs.replace(self._meeting, over=code))

    def _beat(self, now: float) -> None:
        self._beaten = now
        self._meeting = msgspec.structs.replace(self._meeting, beat=self._meeting.beat + 1)
        _write(self._path, self._meeting)


class NodeRole:
    """What a further node does, by what its worker says. Pure, but for the two files.

    Usage:
        node = NodeRole(run_folder, "server-3", rank=1, now=now)
        meeting = node.to_join(now)  # a start that it has not joined: end what runs, and take part in this one
        node.joined(meeting, now)
    """

    def __init__(self, run_folder: Path, server: str, rank: int, now: float) -> None:
        self.state = NODE.initial
        self._path = attendance_path(run_folder, server, rank)
        self._worker = Beats(meeting_path(run_folder, server), Meeting, now)
        self._begun_with = self._worker.read(now)  # of a worker that may have left long ago
        self._said = Attendance(start="", beat=0)
        self._beaten = float("-inf")
        former = _read(self._path, Attendance)
        if former is not None:
            self._said = former
            if former.start:  # what a former process of this node had joined has ended with it
                self.ended(former.ended or "its process was started again", now)

    def to_join(self, now: float) -> Meeting | None:
        """The meeting of a start that this node has not joined yet; call `joined` with it."""
        meeting = self._worker.read(now)
        return meeting if meeting is not None and meeting.over is None and meeting.start != self._said.start else None

    def over(self, now: float) -> int | None:
        """The exit code with which the worker has left since this node began; None while it has not."""
        meeting = self._worker.read(now)
        return None if meeting is None or meeting == self._begun_with else meeting.over

    def silence(self, now: float) -> float:
        """Seconds since the worker said anything."""
        return self._worker.silence(now)

    def joined(self, meeting: Meeting, now: float) -> None:
        self.state = NODE.next(self.state, Event.MEET)
        self._say(Attendance(start=meeting.start, beat=self._said.beat), now)

    def ended(self, reason: str, now: float) -> None:
        """Its part of the server has ended."""
        self.state = NODE.next(self.state, Event.END)
        self._say(msgspec.structs.replace(self._said, ended=reason), now)

    def leave(self, now: float) -> None:
        """The node ends for good, whatever it is part of."""
        joined, self.state = self.state is State.JOINED, NODE.next(self.state, Event.LEAVE)
        if joined:
            self._say(msgspec.structs.replace(self._said, ended="it was ended"), now)

    def beat(self, now: float) -> None:
        """Say that this node lives, as often as is due."""
        if now - self._beaten >= BEAT:
            self._say(self._said, now)

    def _say(self, said: Attendance, now: float) -> None:
        self._beaten = now
        self._said = msgspec.structs.replace(said, beat=said.beat + 1)
        _write(self._path, self._said)


def meeting_path(run_folder: Path, server: str) -> Path:
    return run_folder / "servers" / f"{server}.json"


def attendance_path(run_folder: Path, server: str, rank: int) -> Path:
    return run_folder / "servers" / f"{server}-node-{rank}.json"


def has_joined(run_folder: Path, server: str, rank: int, since: float) -> bool:
    """Whether a further node has been part of its server after `since`, in seconds since the epoch."""
    path = attendance_path(run_folder, server, rank)
    said = _read(path, Attendance)
    return said is not None and bool(said.start) and not said.ended and path.stat().st_mtime >= since


def reserved_meeting(reserve: Callable[[], socket.socket]) -> socket.socket:
    """A reserved port behind which `FURTHER_PORTS` are free, as far as that can be known. Raises OSError."""
    tried: list[socket.socket] = []
    try:
        for _ in range(100):
            held = reserve()
            if all(_is_free(held.getsockname()[1] + further) for further in range(1, FURTHER_PORTS + 1)):
                return held
            tried.append(held)
    finally:
        for held in tried:
            held.close()
    raise OSError(f"no {FURTHER_PORTS + 1} free ports in a row in 100 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def _read(path: Path, said: type[Said]) -> Said | None:
    """None where there is no file, or one that nobody here has written, or that cannot be read now."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=said)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, said: Meeting | Attendance) -> None:
    """Whole, or not at all: on a full disk, or without the file system, the next beat says it all again."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, msgspec.json.encode(said))
    except OSError as error:
        log.warning("%s cannot be written now: %s", path, error.strerror)
