"""Files that one process alone holds: a lock of the kernel's (flock), which ends with the process in any way.

A run's roles have one each, RUN/locks/ROLE.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from streamrl.config.file import ConfigError

log = logging.getLogger(__name__)

MODE = 0o644

CLAIM_POLL = 0.1  # seconds between two tries to claim a role of a run


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


def claim(run_folder: Path, role: str, timeout: float) -> int:
    """Be the run's only process of `role` (`replay-0`) from now on. Returns the file that holds the claim.

    A former one may still be on its way out, as after a kill of its supervisor: it is waited for, so that no
    two write one journal, or one checkpoint. Raises ConfigError after `timeout` seconds.
    """
    path = run_folder / "locks" / role
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, MODE)
    deadline, told = time.monotonic() + timeout, False
    while not locks(handle):
        if not told:
            log.info("%s: another process is %s of this run; it has %.0f s to end", path, role, timeout)
            told = True
        if time.monotonic() > deadline:
            os.close(handle)
            raise ConfigError(f"{path}: another process is {role} of this run and does not end; allowed: one of each")
        time.sleep(CLAIM_POLL)
    return handle


def await_roles(run_folder: Path, timeout: float) -> None:
    """Wait until no process is a role of the run: one that is on its way out writes to the folder by its name.

    Raises ConfigError after `timeout` seconds for all of them.
    """
    deadline = time.monotonic() + timeout
    for path in sorted((run_folder / "locks").glob("*")):
        os.close(claim(run_folder, path.name, max(0.0, deadline - time.monotonic())))
