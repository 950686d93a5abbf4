"""Ending a server as a whole: its processes, its sockets, and the shared memory that SGLang leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from streamrl.lifeline import end_tree

SHARED_MEMORY = Path("/dev/shm")

FAMILIES = ("sglang_", "sgl_", "sem.mp-", "nccl-", "cuda.shm.")
# Segments that SGLang, multiprocessing and NCCL only remove when they end by themselves. Others that a server
# has mapped (a weight transport's) belong to someone else.


def end_server(pid: int, grace: float, scratch: Path | None, *, include_root: bool = True) -> None:
    """End the server whose launch process is `pid`: SIGTERM, `grace` seconds, SIGKILL; then remove what it left.

    `include_root=False` is for the launch process itself. Blocks for `grace` and at most 10 seconds.
    """
    segments = _segments(pid)
    end_tree(pid, grace, include_root=include_root)
    for segment in segments:
        segment.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _segments(pid: int) -> set[Path]:
    """The segments of the known families that processes of the tree have mapped.

    Told by inode: libc makes a semaphore under another name first, and that is the one in a process's map.
    """
    mapped: set[int] = set()
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return set()
    for process in tree:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        mapped |= {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if str(SHARED_MEMORY) in line}
    return {path for path in SHARED_MEMORY.iterdir() if path.name.startswith(FAMILIES) and _inode(path) in mapped}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # its owner has removed it meanwhile
        return None
