"""Who is rank 0 of the weight groups: this process, where the backend lets go of a server that is lost.

NCCL does not. What it does instead, and what follows from it: `publish/rank_zero_process.py`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check
from streamrl.publish.weight_group import Meeting, begin, join, leave

LEFT_POLL = 0.1  # seconds between two looks at the broadcast to a server that was dropped; nobody waits for its end


class RankZero(ABC):
    """Joins a group with the first version that is sent in it, and stays until it leaves. Used by one thread."""

    @abstractmethod
    def prepare(self) -> None:
        """Something will be sent soon. Does not wait."""

    @abstractmethod
    def is_in(self, group: str) -> bool:
        """Whether what was sent last in this group has arrived, so that the next version may be sent in it."""

    @abstractmethod
    def send(self, meeting: Meeting, store: dist.TCPStore, staged: Staged, check: Check) -> None:
        """One broadcast a bucket. `store`: the master of the group's, where the server's ranks have come.

        Raises RuntimeError, whatever goes wrong, and what `check` raises.
        """

    @abstractmethod
    def leave(self, group: str) -> None:
        """Leave this group, if it is in it. Does not wait for the others."""

    def reads_on(self) -> bool:
        """As of `Source`."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Leave every group."""


@dataclass(slots=True)
class _Membership:
    members: dist.ProcessGroup
    work: dist.Work | None = None  # the broadcast that was begun last


class OwnRankZero(RankZero):
    """This process, by gloo: a connection that is lost ends the broadcast with an error, at both of its ends."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        """`timeout`: seconds that gloo waits for a server that is connected and silent."""
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, _Membership] = {}
        self._left: list[dist.Work] = []  # broadcasts to servers that were dropped

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def is_in(self, group: str) -> bool:
        return group in self._groups

    def send(self, meeting: Meeting, store: dist.TCPStore, staged: Staged, check: Check) -> None:
        mine = self._groups.get(meeting.group)
        if mine is None:
            mine = self._groups[meeting.group] = _Membership(join(meeting, store, self._timeout))
        for bucket in staged.buckets:
            mine.work = begin(mine.members, bucket.data.to(self._device))
            while not mine.work.is_completed():
                check()
            mine.work.wait()  # raises what went wrong

    def leave(self, group: str) -> None:
        mine = self._groups.pop(group, None)
        if mine is None:
            return
        leave(mine.members)
        if mine.work is not None and not mine.work.is_completed():
            self._left.append(mine.work)
            threading.Thread(target=_outlast, args=(mine.members, mine.work), name="left", daemon=True).start()

    def reads_on(self) -> bool:
        self._left = [work for work in self._left if not work.is_completed()]
        return bool(self._left)

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)


def _outlast(members: dist.ProcessGroup, work: dist.Work) -> None:
    """Hold a group until its last broadcast has ended, if need be by its timeout.

    gloo has no abort: the last one to let go of a group waits for what is under way on it. Here that is a thread with
    nothing else to do, and not the publisher's, which has other servers. It never waits inside torch: a thread that
    is there when the process ends takes the process down with an error.
    """
    while not work.is_completed():
        time.sleep(LEFT_POLL)
