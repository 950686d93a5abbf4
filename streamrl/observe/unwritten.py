"""What cannot be written to stdout or stderr: no reader is left, or the disk has no room. The process goes on."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import IO

GONE = (errno.EPIPE, errno.EIO)  # its reader, or the terminal of a session that has ended


def bear(error: OSError, stream: IO[str]) -> None:
    """Go on after a failed write: in silence where nobody reads any more, else the next line is tried."""
    if error.errno in GONE:
        silence(stream)


def settle() -> None:
    """At the end of the process: what could not be written does not change its exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: IO[str]) -> None:
    """What is written to it from now on goes nowhere, what it holds back for the end of the process too."""
    with suppress(OSError, ValueError):  # it is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
