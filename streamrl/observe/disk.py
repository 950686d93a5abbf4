"""Writing where the disk may be full: a record is in the file whole, or not at all, and may wait for room."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

# How the operating system says that a file cannot grow now, and may later.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ROOM_POLL = 1.0  # seconds between two tries on a full disk

# Called between two tries, with the seconds since the first one; raises where the wait for room is over.
RoomCheck = Callable[[float], None]

_NUMBER = re.compile(r"os error (\d+)")


def lacks_room(error: Exception) -> bool:
    """Whether a write has failed for want of room. An error of safetensors has the system's number in its text."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    number = _NUMBER.search(str(error))
    return number is not None and int(number[1]) in NO_ROOM


def in_room(path: Path, write: Callable[[], object], check: RoomCheck | None) -> None:
    """Write to `path` once the disk has room for it. Raises OSError, and what `check` raises; without it, at once."""
    began: float | None = None
    while True:
        try:
            write()
            return
        except OSError as error:
            if check is None or not lacks_room(error):
                raise
            now = time.monotonic()
            if began is None:
                began = now
                log.error("%s: %s; training waits for room", path, error.strerror)
        check(now - began)
        time.sleep(ROOM_POLL)


def append(file: int, record: bytes) -> None:
    """Write `record` at the end of `file`, which nobody else appends to. Raises OSError, and leaves the file as it was.

    The operating system takes a part of it where there is room for no more; that part is cut off again.
    """
    written = os.write(file, record)
    if written < len(record):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
