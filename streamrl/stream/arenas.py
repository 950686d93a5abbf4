"""Memory of groups on their way, used again: fresh pages cost more than the send of what is written to them.

A group that lies in one piece travels from where it is (`stream/contiguous.py`). For others a sender fills buffers of
its own, `Arenas`:

    lent ──tracker done: ZeroMQ has let go──▶ free ──allocate──▶ filled ──lend──▶ lent

A receiver gets what libzmq takes from malloc, which `keep_pages` tells not to give its pages back, until too much is
unread (`give_pages_back`).
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque

import numpy as np
import zmq

# Free buffers kept: one is filled while ZeroMQ still sends the ones before it.
KEPT = 4

GRAIN = 1 << 16  # bytes; sizes are rounded up to it, so that groups of about one size fit into each other's buffers

# Bytes of a frame that is cheaper copied than lent: ZeroMQ lets go of a lent one in a thread that needs the GIL.
COPIED = 1 << 20

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
HELD = 64 << 20  # free bytes at the end of a heap that malloc holds
LARGE = 32 << 20  # bytes of a block that malloc maps again each time


@functools.cache
def keep_pages() -> None:
    """Have malloc use the pages of a message for the next one. Holds for the process, and is done once.

    The two values are those at which glibc's own adaptation ends; by itself it gets there only after a block
    of 32 MiB, and until then gives every large message's pages back and faults them in again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; other C libraries have no such switch
        libc.mallopt(_TRIM, HELD)
        libc.mallopt(_MMAP, LARGE)


def give_pages_back() -> None:
    """Have malloc give back the pages that nothing lies in, which it keeps otherwise, between blocks too.

    Messages that libzmq decrypts have about one size, and their copies another: what is freed of one does not hold
    the next, and a process may keep as much as it needs.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class Arenas:
    """The buffers of one socket; not for several threads.

    >>> arenas = Arenas()
    >>> arena = arenas.allocate(1_000_000).data  # uint8 [1000000], its content undefined
    >>> arenas.gave(arena)
    True

    After `socket.send(arena, copy=False, track=True)`, `lend(arena, tracker)` keeps it until ZeroMQ has sent it.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lent: deque[tuple[zmq.MessageTracker, np.ndarray]] = deque()
        self._newest: np.ndarray | None = None

    def allocate(self, size: int) -> np.ndarray:
        """A uint8 [size] that nobody reads any more."""
        while self._lent and self._lent[0][0].done:
            self._free.insert(0, self._lent.popleft()[1])
        del self._free[KEPT:]
        fitting = next((index for index, arena in enumerate(self._free) if len(arena) >= size), None)
        whole = np.empty(-(-size // GRAIN) * GRAIN, np.uint8) if fitting is None else self._free.pop(fitting)
        self._newest = whole
        return whole[:size]

    def gave(self, arena: memoryview) -> bool:
        """Whether this is what `allocate` gave last, and not memory that its owner keeps."""
        return arena.obj.base is self._newest is not None  # type: ignore[attr-defined]  # the whole behind the array

    def lend(self, arena: memoryview, tracker: zmq.MessageTracker) -> None:
        """What `allocate` gave is read until `tracker` is done."""
        self._lent.append((tracker, arena.obj.base))  # type: ignore[attr-defined]  # the whole behind the array
