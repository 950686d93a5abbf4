"""A process in a session of its own: what it is given, the beginning of what it prints, and its end."""

from __future__ import annotations

import asyncio

from streamrl.lifeline import kill_group

CHUNK = 1 << 16  # bytes read at once


async def exchange(
    process: asyncio.subprocess.Process, given: bytes, most: int, kept: bytearray | None = None
) -> bytearray:
    """The first `most` bytes of a process's output, once it is closed; what goes beyond is read and dropped.

    Its input and output are pipes. One that has ended before it has read all is no error.
    kept: empty, filled as the output comes, for a caller that may not wait for all of it.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    kept = bytearray() if kept is None else kept
    await asyncio.gather(_give(process.stdin, given), _keep_beginning(process.stdout, most, kept))
    return kept


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill the session that a process leads, and wait for the process's end."""
    kill_group(process.pid)
    await process.wait()


async def _give(pipe: asyncio.StreamWriter, given: bytes) -> None:
    try:
        pipe.write(given)
        await pipe.drain()
        pipe.close()
    except (ConnectionError, RuntimeError):  # the second is uvloop's word for a pipe that is closed
        pass  # it has ended already, and its exit code tells why


async def _keep_beginning(pipe: asyncio.StreamReader, most: int, kept: bytearray) -> None:
    while chunk := await pipe.read(CHUNK):
        kept += chunk[: max(0, most - len(kept))]
