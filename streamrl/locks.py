"""Files that one process alone holds: a lock of the kernel's (flock), which ends with the process in any way."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

MODE = 0o644


def locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """The open file that holds the lock until it is closed; None when another process has it. Raises OSError."""
    handle = os.open(path, flags, MODE)
    if locks(handle):
        return handle
    os.close(handle)
    return None


def locks(handle: int) -> bool:
    """Whether an open file has the lock now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
