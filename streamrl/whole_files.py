"""Files and folders that appear complete or not at all: nobody reads half of one, and what was there stays until then.

    drafted ─▶ a hidden draft beside the path ─▶ what is written ─▶ renamed over the path; removed where that failed

`durable`: on the disk before it has its name, for what is read after the machine has crashed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Write a file in place of what was there; text as UTF-8. Raises OSError."""
    with drafted(path, durable=durable) as draft:
        draft.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextmanager
def drafted(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` at the end of the block. Raises OSError."""
    draft = _draft_of(path)
    try:
        yield draft
        if durable:
            sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def drafted_folder(folder: Path, *, replaces: bool = True) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` at the end of the block. Raises OSError.

    replaces: whether what is there then is removed; without, it has to be empty.
    """
    draft = _draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if replaces:
            shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
