"""Files and folders that appear complete or not at all: nobody reads half of one, and what was there stays until then.

    drafted ─▶ a hidden draft beside the path ─▶ what is written ─▶ renamed over the path; removed where that failed

No folder can be renamed over another: `replace_folder` first renames the former one to `.NAME.old`. A process that is
killed between the two renames leaves it there, whole, and the next one that writes the folder gives it its name back.

`durable`: on the disk before it has its name, for what is read after the machine has crashed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_OLD = ".old"


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
def drafted_folder(folder: Path, *, replaces: bool = True, durable: bool = False) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` at the end of the block. Raises OSError.

    replaces: whether what is there then is removed; without, it has to be empty.
    """
    draft = _draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    put_back(folder)
    draft.mkdir(parents=True)
    try:
        yield draft
        if durable:
            sync_folder(draft)
        if replaces:
            replace_folder(folder, draft, durable=durable)
        else:
            draft.rename(folder)
            if durable:
                sync(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def replace_folder(
    folder: Path, draft: Path, *, durable: bool = False, remove: Callable[[Path], object] | None = None
) -> None:
    """Give `draft` the name of `folder`, and remove what had it.

    At every moment one of the two is whole, as `folder` or as `former_of(folder)`. remove: of the former one, which has
    another name by then; by default what cannot be removed is left to the next replacement. Raises OSError; where
    `draft` could not be renamed, `folder` is as it was.
    """
    replaces = folder.exists()
    former = set_aside(folder) if replaces else former_of(folder)
    try:
        draft.rename(folder)
    except BaseException:
        if replaces:
            put_back(folder)
        raise
    if durable:
        sync(folder.parent)
    if former.exists():
        (remove or _remove)(former)


def set_aside(folder: Path) -> Path:
    """Rename a folder to `former_of(folder)`, without a moment in which half of it has its name. Raises OSError."""
    former = former_of(folder)
    _remove(former)
    folder.rename(former)
    return former


def put_back(folder: Path) -> None:
    """Give a folder that was set aside its name back; remove it where its successor is there. Raises OSError."""
    former = former_of(folder)
    if folder.exists():
        _remove(former)
    elif former.exists():
        former.rename(folder)


def clear(root: Path) -> None:
    """Tidy up after processes that were killed while they wrote folders in `root`, which nobody writes to now."""
    for path in root.glob(".*"):
        if path.name.endswith(_OLD):
            put_back(root / path.name[1 : -len(_OLD)])
        else:
            _remove(path)


def former_of(folder: Path) -> Path:
    """The name of a folder that is replaced or removed."""
    return folder.with_name(f".{folder.name}{_OLD}")


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until a folder is on disk, with everything inside it but its own name. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
