"""Ending a server as a whole: its processes, its sockets, and the shared memory that SGLang leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")

# Segments that SGLang, multiprocessing and NCCL only remove when they end by themselves, or never. Others that a server
# has mapped (a weight transport's) belong to someone else.
FAMILIES = ("sglang_", "sgl_", "sem.mp-", "nccl-", "cuda.shm.")

REAP = 10.0  # seconds that the kernel may take to end killed processes


def end_server(
    pid: int, grace: float, scratch: Path | None, *, known: Iterable[Path] = (), include_root: bool = True
) -> None:
    """End the server whose launch process is `pid`: SIGTERM, `grace` seconds, SIGKILL; then remove what it left.

    The launch process leads a session, so that its processes are found when it has been killed itself; the
    segments that dead ones held are in nobody's maps any more, and `known` from before.
    `include_root=False` is for the launch process itself. Blocks for `grace` and REAP seconds at most.
    """
    segments = {*known, *segments_of(pid)}
    if include_root and grace > 0:
        _terminate(pid, grace)
    processes = _freeze(pid)  # one that is starting could make a segment between the look and the kill
    segments |= _held(processes)
    ended = [process for process in processes if include_root or process.pid != pid]
    for process in ended:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ended, REAP)
    for segment in segments:
        segment.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def segments_of(pid: int) -> set[Path]:
    """The segments of the known families that the server's processes hold now."""
    return _held(_processes(pid))


def _processes(pid: int) -> list[psutil.Process]:
    """The launch process, its descendants, and those of its session that have lost their parent."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        found = {process.pid: process for process in [root, *root.children(recursive=True)]}
    for other in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if other not in found and os.getsid(other) == pid:
                found[other] = psutil.Process(other)
    return [process for process in found.values() if not _is_dead(process)]


def _is_dead(process: psutil.Process) -> bool:
    """Dead ones that nobody has waited for hold nothing, and who is not root may not look at what they hold."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def _terminate(pid: int, grace: float) -> None:
    processes = _processes(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).terminate()
    psutil.wait_procs(processes, grace)


def _freeze(pid: int) -> list[psutil.Process]:
    """Stop every process of the server but the calling one, and whatever they started until they were stopped."""
    frozen: dict[int, psutil.Process] = {}
    while new := [process for process in _processes(pid) if process.pid not in frozen]:
        for process in new:
            frozen[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != os.getpid():
                    process.suspend()
    return list(frozen.values())


def _held(processes: Iterable[psutil.Process]) -> set[Path]:
    """The segments that these processes have mapped, or have opened and not mapped yet.

    Told by inode: libc makes a semaphore under another name first, and that is the one in a process's map.
    """
    inodes: set[int | None] = set()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended meanwhile
            folder = Path(f"/proc/{process.pid}")
            maps = (folder / "maps").read_text().splitlines()
            inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if str(SHARED_MEMORY) in line}
            inodes |= {_inode(link) for link in (folder / "fd").iterdir() if _points_to_memory(link)} - {None}
    return {path for path in SHARED_MEMORY.iterdir() if path.name.startswith(FAMILIES) and _inode(path) in inodes}


def _points_to_memory(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith(str(SHARED_MEMORY))
    except (FileNotFoundError, PermissionError):  # closed, or ended, meanwhile
        return False


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # its owner has removed it meanwhile
        return None
