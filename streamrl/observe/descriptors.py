"""File descriptors: as many as the system allows, and some kept back for what must not fail when they run out."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

# How the operating system says that a process, or the machine, may open nothing now, and may later.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

# The limit that is asked for: a fleet's connections many times over. Programs that go through every number that a
# descriptor can have, before they start another, take seconds with the largest limits that systems allow.
ENOUGH = 1 << 16

# Descriptors in reserve: a new segment, its folder and one segment that is read, and one to spare.
KEPT = 4

T = TypeVar("T")


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it may, up to `ENOUGH`. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Reserve:
    """Descriptors that are open for nothing, until there are no others. `close` it.

    >>> reserve = Reserve()
    >>> file = reserve.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
    >>> os.close(file), reserve.close()
    (None, None)
    """

    def __init__(self, count: int = KEPT) -> None:
        self._count = count
        self._kept: list[int] = []
        self._fill()

    def attempt(self, call: Callable[[], T]) -> T:
        """What `call` returns; it is called again, with the reserve given up, where there was no descriptor left.

        Raises what it raises: another thread may have been faster. The reserve is filled up again as far as it goes.
        """
        self._fill()
        try:
            return call()
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
        self.close()
        try:
            return call()
        finally:
            self._fill()

    def close(self) -> None:
        """Give them up. May be called twice."""
        while self._kept:
            os.close(self._kept.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # the next attempt tries again
            while len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
