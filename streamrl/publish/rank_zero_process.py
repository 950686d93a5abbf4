"""Rank 0 of NCCL's weight groups in a process of its own, which is killed where NCCL would not come back.

    publisher   Send(meeting, place) ──▶ process: join, one broadcast a bucket ──▶ Sent: done
        ▲ polls, and checks              │ a server is lost: it hangs, as long as it likes
        └──────── gives up: kill ────────┘

What torch's ProcessGroupNCCL does with a server that is lost rules out every gentler way (torch 2.13):

- The communicator is made inside the first broadcast, which blocks its thread until all ranks are there. No timeout
  counts yet, and `abort` does not find the communicator before it is made.
- A broadcast whose receiver is lost never ends. Its kernel holds on to the device, and code that waits for all that
  the device does waits for it: in the learner's own process, the training loop.
- After the group's timeout, or an error of a connection, torch's watchdog ends the process.
- `abort` itself may hang, which is why the watchdog does not call it.

So the learner has no part in these groups: what is killed is this process, and the driver cleans up behind it. The
groups that it had with other servers are made again with their next version.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from streamrl.device import Device
from streamrl.device_copy import DeviceCopy, copying
from streamrl.engine.kept_memory import KeptReader, Place
from streamrl.lifeline import die_with
from streamrl.publish.rank_zero import RankZero
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check
from streamrl.publish.weight_group import Meeting, begin, join, leave

log = logging.getLogger(__name__)

# In the process there is no watchdog that could end it before it has said what is wrong.
ENVIRONMENT = {"TORCH_NCCL_BLOCKING_WAIT": "1"}

SENT_POLL = 0.001  # seconds between two looks at a broadcast; the process has nothing else to do

START_LIMIT = 300.0  # seconds to import torch, on a busy machine, and to find the device

LEAVE_LIMIT = 10.0  # seconds to leave a group in which nothing is under way

END_LIMIT = 10.0  # seconds that the driver may take to clean up behind a killed process, at the end of the run


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Broadcast the buckets at `place`, in the group that meets at `meeting`."""

    meeting: Meeting
    place: Place


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    group: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to either; and one at first, when it can be told something."""

    error: str | None = None  # what went wrong


_DONE = msgspec.json.Decoder(Done)


class SeparateRankZero(RankZero):
    """The process as its parent has it. It ends with the thread that started it, in `prepare`."""

    def __init__(self, device: Device, timeout: float) -> None:
        """`timeout`: seconds to find the store of a group."""
        self._device = device
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._received = b""  # of an answer that has not come whole
        self._owed = 0  # answers that nobody has waited for
        self._limit = 0.0  # when what they are to is late
        self._groups: set[str] = set()
        self._ending: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int | None:
        """None where no process runs."""
        return self._process.pid if self._runs() and self._process else None

    def prepare(self) -> None:
        """Start the process; it imports torch while the server joins."""
        self._ending = [process for process in self._ending if process.poll() is None]
        if self._runs():
            return
        self._end()
        mine, its = socket.socketpair()
        words = [os.getpid(), self._device.kind, self._device.index, self._timeout]
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "streamrl.publish.rank_zero_process", *map(str, words)],
                stdin=its.fileno(),
                env={**os.environ, **ENVIRONMENT},
            )
        mine.setblocking(False)
        self._channel, self._owed, self._limit = mine, 1, time.monotonic() + START_LIMIT

    def is_in(self, group: str) -> bool:
        return self._runs() and group in self._groups

    def send(self, meeting: Meeting, store: dist.TCPStore, staged: Staged, check: Check) -> None:
        assert staged.place is not None  # the transport stages into kept memory
        if self._channel is None:  # it was given up since the manifest, and the server waits for one that is gone
            raise RuntimeError(self._ended())
        self._await_idle(check)
        try:
            self._say(Send(meeting=meeting, place=staged.place), check)
            answer = self._answer(check)
            if answer.error is not None:
                raise RuntimeError(answer.error)
        except BaseException:  # what has failed once, or is given up, may hang, or its device may be lost
            self._end()
            raise
        self._groups.add(meeting.group)

    def leave(self, group: str) -> None:
        if not self.is_in(group):
            return
        self._groups.discard(group)
        try:
            self._say(Leave(group=group), _full)
            self._limit = time.monotonic() + LEAVE_LIMIT
        except RuntimeError as error:
            log.info("the weight groups are left at once: %s", error)
            self._end()

    def close(self) -> None:
        self._end()
        for process in self._ending:
            try:
                process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                log.warning("process %d, which had the weight groups, was killed and does not end", process.pid)

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self) -> None:
        """Kill the process, whatever it is in; every group is left by that. Does not wait."""
        if self._process is not None:
            self._process.kill()
            self._ending.append(self._process)
        if self._channel is not None:
            self._channel.close()
        self._process, self._channel, self._received, self._owed = None, None, b"", 0
        self._groups.clear()

    def _await_idle(self, check: Check) -> None:
        """Wait until it has started, and has left the groups that it was told to leave.

        Who gives up here leaves it to that: a short `publish.timeout` must not kill it before it has ever started.
        """
        while self._owed:
            try:
                self._answer(lambda: self._check_late(check))
            except RuntimeError:
                if time.monotonic() > self._limit or not self._runs():
                    self._end()
                raise

    def _check_late(self, check: Check) -> None:
        check()
        if time.monotonic() > self._limit:
            raise RuntimeError("the process that broadcasts the weights hangs")

    def _say(self, order: Send | Leave, check: Check) -> None:
        assert self._channel is not None
        data = msgspec.json.encode(order) + b"\n"
        self._owed += 1
        while data:
            try:
                data = data[self._channel.send(data) :]
            except BlockingIOError:
                check()
            except OSError as error:
                raise RuntimeError(self._ended()) from error

    def _answer(self, check: Check) -> Done:
        assert self._channel is not None
        while b"\n" not in self._received:
            try:
                received = self._channel.recv(1 << 16)
            except BlockingIOError:
                check()
                continue
            except OSError as error:
                raise RuntimeError(self._ended()) from error
            if not received:
                raise RuntimeError(self._ended())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        self._owed -= 1
        return _DONE.decode(line)

    def _ended(self) -> str:
        code = self._process.poll() if self._process is not None else None
        return f"the process that broadcasts the weights has ended{f' with exit code {code}' if code else ''}"


def _full() -> None:
    """Nobody reads what it is told: it is in the middle of something."""
    raise RuntimeError("the process that broadcasts the weights does not listen")


def main(parent: int, kind: str, index: int, timeout: float) -> None:
    """Does what it is told until nobody is left to tell it anything."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach all: the learner decides
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    device = Device("cuda" if kind == "cuda" else "cpu", index)
    device.select(1)
    groups = _Groups(copying(device), timedelta(seconds=timeout))
    orders = msgspec.json.Decoder(Send | Leave)
    _tell(channel, Done())
    with channel.makefile("rb") as lines:
        for line in lines:
            _tell(channel, groups.obey(orders.decode(line)))
    os._exit(0)  # torch's own end would wait for groups whose servers are gone


def _tell(channel: socket.socket, done: Done) -> None:
    channel.sendall(msgspec.json.encode(done) + b"\n")


class _Groups:
    """The groups as the process has them."""

    def __init__(self, copying: DeviceCopy, timeout: timedelta) -> None:
        self._copying = copying
        self._timeout = timeout
        self._members: dict[str, dist.ProcessGroup] = {}
        self._reader = KeptReader(lambda region: copying.pin(region, read_only=True))

    def obey(self, order: Send | Leave) -> Done:
        try:
            if isinstance(order, Leave):
                leave(self._members.pop(order.group))
            else:
                with self._reader.reading(order.place) as buckets:
                    self._broadcast(order.meeting, [_as_tensor(bucket) for bucket in buckets])
        except RuntimeError as error:  # torch's network and backend errors are RuntimeErrors of several names
            return Done(error=str(error))
        return Done()

    def _broadcast(self, meeting: Meeting, buckets: Sequence[torch.Tensor]) -> None:
        """One bucket after another; while one goes out, the next is brought to the device."""
        members = self._members.get(meeting.group)
        if members is None:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=self._timeout)
            members = self._members[meeting.group] = join(meeting, store, self._timeout)
        with self._copying.sending():
            ahead = self._copying.into(buckets[0])
            for following in (*buckets[1:], None):
                work = begin(members, ahead)
                if following is not None:
                    ahead = self._copying.into(following)
                while not work.is_completed():
                    time.sleep(SENT_POLL)
                work.wait()  # raises what went wrong


def _as_tensor(bucket: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that must not be written; nobody does
        return torch.from_numpy(bucket)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
