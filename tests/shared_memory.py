"""What is left in /dev/shm, while tests in other processes use it too."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
PATIENCE = 15.0  # seconds; the process that ends a server of another test removes its segments a moment later


def nobodys() -> set[str]:
    """The segments that no living process has mapped or open: they stay until somebody removes them."""
    found = {path.name: inode for path in MEMORY.iterdir() if path.is_file() and (inode := _inode(path))}
    held = {inode for pid in psutil.pids() for inode in _held(Path(f"/proc/{pid}"))}
    return {name for name, inode in found.items() if inode not in held}


def assert_none_is_left(before: set[str]) -> None:
    """No segment is nobody's beside those of before."""
    deadline = time.monotonic() + PATIENCE
    while left := nobodys() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _held(process: Path) -> set[int]:
    """Inodes: a semaphore is mapped under another name than the one that it has."""
    try:
        maps = (process / "maps").read_text().splitlines()
        links = list((process / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()  # it has ended, or is none of ours
    opened = {inode for link in links if _target(link).startswith(str(MEMORY)) and (inode := _inode(link))}
    return opened | {int(line.split(maxsplit=5)[4]) for line in maps if str(MEMORY) in line}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
