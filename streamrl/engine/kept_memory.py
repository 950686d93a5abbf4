"""Memory that one process writes and others on its host read, mapped once and kept from version to version.

    owner    begin: nobody is inside ──▶ sequence 0 ──▶ bytes ──▶ finish: sequence n ──▶ (a message says where and n)
    reader   lock, shared ──▶ is it n? ──▶ views of the bytes ──▶ unlock

The lock (flock) is the acknowledgement: the kernel lets go of it when a reader ends in any way, and keeps it for
one that hangs. The owner never waits: memory with a reader inside is left to that reader, and new memory
takes its place. The memory is a memfd: it has no name in /dev/shm, and is gone with the last process that has it.
Readers find it as /proc/PID/fd/N, which the kernel shows to the same user in the same PID namespace alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

HEADER = struct.Struct("<16s16sQ")  # what it is, which one it is, the sequence number of its content

MAGIC = b"streamrl memory1"

PAGE = mmap.ALLOCATIONGRANULARITY

# Told of memory that was just mapped.
Mapped = Callable[[np.ndarray], None]

KEPT = 2  # memories that a reader keeps mapped: an owner writes two in turn


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version's buckets lie, and how to see that it is this version."""

    path: str
    token: str  # of this memory, hexadecimal
    sequence: int
    offsets: tuple[int, ...]  # of each bucket, in bytes
    sizes: tuple[int, ...]


class Unreadable(RuntimeError):
    """The memory of a Place is not there, or holds something else by now."""


@dataclass(slots=True)
class _Region:
    offset: int
    data: np.ndarray  # uint8 [capacity]


class KeptMemory:
    """The owner's side of one memory. One thread; `close` it, or forget it.

    Usage:
        memory = KeptMemory()
        if memory.begin():
            memory.allocate(0, 1_000_000)[:] = weights
            place = memory.finish()
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("streamrl-weights", os.MFD_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._token = secrets.token_bytes(16)
        self._sequence = 0
        self._size = PAGE
        os.ftruncate(self._file, self._size)
        self._header = mmap.mmap(self._file, PAGE)
        self._regions: list[_Region] = []
        self._used: list[int] = []  # bytes of each bucket of the present content
        self._mark(0)

    def begin(self) -> bool:
        """Take it for writing; what it holds is no version from here on. False: a reader is inside."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._mark(0)
        self._used.clear()
        return True

    def allocate(self, index: int, size: int) -> np.ndarray:
        """Bucket `index`, uint8 [size], at the place that it had before where it fits; buckets come in order."""
        if index == len(self._regions):
            self._regions.append(self._region(size))
        elif len(self._regions[index].data) < size:
            self._regions[index] = self._region(size)
        self._used.append(size)
        return self._regions[index].data[:size]

    def finish(self) -> Place:
        """What was allocated is written: let readers in."""
        self._sequence += 1
        self._mark(self._sequence)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return Place(
            path=f"/proc/{os.getpid()}/fd/{self._file}",
            token=self._token.hex(),
            sequence=self._sequence,
            offsets=tuple(region.offset for region in self._regions[: len(self._used)]),
            sizes=tuple(self._used),
        )

    def close(self) -> None:
        """Let go of it; readers that have it mapped keep it, and no other finds it."""
        self._closing()

    def _mark(self, sequence: int) -> None:
        HEADER.pack_into(self._header, 0, MAGIC, self._token, sequence)

    def _region(self, size: int) -> _Region:
        """Further memory behind all that there is: what readers have mapped stays where it is."""
        offset, capacity = self._size, max(PAGE, -(-size // PAGE) * PAGE)
        self._size += capacity
        os.ftruncate(self._file, self._size)
        mapped = mmap.mmap(self._file, capacity, offset=offset)
        return _Region(offset, np.frombuffer(mapped, np.uint8))


class SingleMemory:
    """One memory, whose readers are done before the next version is written.

    Where a reader hangs in it, it is left to that reader and replaced.
    """

    def __init__(self) -> None:
        self._memory = KeptMemory()

    def begin(self) -> None:
        if not self._memory.begin():
            memory = KeptMemory()  # where there is none, the former one stays as it is
            self._memory.close()
            self._memory = memory
            self._memory.begin()

    def allocate(self, index: int, size: int) -> np.ndarray:
        """As `KeptMemory`."""
        return self._memory.allocate(index, size)

    def finish(self) -> Place:
        """As `KeptMemory`."""
        return self._memory.finish()

    def leave(self) -> None:
        """Readers hold a lock, which `begin` sees."""

    def close(self) -> None:
        self._memory.close()


class DoubleMemory:
    """Two memories in turn, so that a version can be written while the one before is still read."""

    def __init__(self) -> None:
        self._writing, self._waiting = SingleMemory(), SingleMemory()

    def begin(self) -> None:
        self._writing, self._waiting = self._waiting, self._writing
        self._writing.begin()

    def allocate(self, index: int, size: int) -> np.ndarray:
        """As `KeptMemory`."""
        return self._writing.allocate(index, size)

    def finish(self) -> Place:
        """As `KeptMemory`."""
        return self._writing.finish()

    def leave(self) -> None:
        """Readers hold a lock, which `begin` sees."""

    def close(self) -> None:
        self._writing.close()
        self._waiting.close()


@dataclass(slots=True)
class _Opened:
    """A memory as a reader has it."""

    file: int
    header: mmap.mmap
    regions: dict[int, np.ndarray] = field(default_factory=dict)

    def bucket(self, offset: int, size: int, mapped: Mapped) -> np.ndarray:
        """Mapped with all of its pages the first time: a fault a page costs more than the copy."""
        region = self.regions.get(offset)
        if region is None or len(region) < size:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(self.file, size, flags=flags, prot=mmap.PROT_READ, offset=offset)
            region = self.regions[offset] = np.frombuffer(memory, np.uint8)
            mapped(region)
        return region[:size]


class KeptReader:
    """A reading process's side of all memories that were announced to it. Not for several threads."""

    def __init__(self, mapped: Mapped = lambda region: None) -> None:
        """`mapped`: told of each region, uint8 and read-only, when it is mapped."""
        self._mapped = mapped
        self._opened: OrderedDict[str, _Opened] = OrderedDict()

    @contextlib.contextmanager
    def reading(self, place: Place) -> Iterator[list[np.ndarray]]:
        """The buckets, uint8 [size] each and read-only, which nobody writes to inside the block. Raises Unreadable."""
        memory = self._open(place)
        try:
            fcntl.flock(memory.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unreadable(f"{place.path} is being written again") from None
        try:
            if (found := _content(memory.header)) != (place.token, place.sequence):
                raise Unreadable(f"{place.path} holds content {found[1]}, announced was {place.sequence}")
            yield [memory.bucket(offset, size, self._mapped) for offset, size in _pairs(place)]
        finally:
            fcntl.flock(memory.file, fcntl.LOCK_UN)

    def close(self) -> None:
        while self._opened:
            self._forget()

    def _open(self, place: Place) -> _Opened:
        opened = self._opened.get(place.token)
        if opened is None:
            opened = self._opened[place.token] = _open(place)
        self._opened.move_to_end(place.token)
        while len(self._opened) > KEPT:
            self._forget()
        return opened

    def _forget(self) -> None:
        """The one unused for longest; its maps go when nobody has views of them any more."""
        _, opened = self._opened.popitem(last=False)
        os.close(opened.file)


def check_readable(place: Place) -> None:
    """Raises Unreadable where this process does not see the memory, as on another host."""
    opened = _open(place)
    opened.header.close()
    os.close(opened.file)


def _open(place: Place) -> _Opened:
    try:
        file = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(f"{place.path}: {error.strerror}") from error
    try:
        header = mmap.mmap(file, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if _content(header)[0] != place.token:
            raise Unreadable(f"{place.path} is another process's by now")
    except (OSError, ValueError) as error:  # ValueError: too small to be mapped
        os.close(file)
        raise Unreadable(f"{place.path}: {error}") from error
    except Unreadable:
        os.close(file)
        raise
    return _Opened(file, header)


def _content(header: mmap.mmap) -> tuple[str, int]:
    """Token and sequence; an empty token where it is no memory of this kind."""
    magic, token, sequence = HEADER.unpack_from(header)
    return (token.hex() if magic == MAGIC else ""), sequence


def _pairs(place: Place) -> Sequence[tuple[int, int]]:
    return list(zip(place.offsets, place.sizes, strict=True))
