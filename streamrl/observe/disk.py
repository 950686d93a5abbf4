"""Appending where the disk may be full: a record is in the file whole, or not at all."""

from __future__ import annotations

import errno
import os

# How the operating system says that a file cannot grow now, and may later.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def append(file: int, record: bytes) -> None:
    """Write `record` at the end of `file`, which nobody else appends to. Raises OSError, and leaves the file as it was.

    The operating system takes a part of it where there is room for no more; that part is cut off again.
    """
    written = os.write(file, record)
    if written < len(record):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
