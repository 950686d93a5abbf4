"""The tool `python`: code of the policy, run in a process of its own without network, within limits and a deadline.

    PythonTool (asyncio, in the worker) ── code ──▶ python -I sandbox.py ── fork ──▶ the code, walled off
                                        ◀── what it printed, at most `output` characters

Where the kernel allows no namespaces the tool raises NoWalls, unless `walls=False` says that the machine itself is
the wall.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.process_pipes import exchange, kill
from streamrl.tasks.sandbox import UNWALLED

SANDBOX = Path(__file__).with_name("sandbox.py")

WALLS_TIMEOUT = 30.0  # seconds for the look whether there are walls, on a busy machine


class NoWalls(RuntimeError):
    """The kernel allows no namespaces here, so the code of a policy would have the network and the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one run of code may take."""

    seconds: float = 5.0  # from start to kill
    memory: int = 512 << 20  # bytes of address space
    file_size: int = 8 << 20  # bytes of each file that is written
    processes: int = 16  # at once, threads included; as root all runs of a tool share `parallel` times as many
    output: int = 4096  # characters that the policy observes; what comes after is dropped


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder that the code is given. Example: `Mount(Path("/tmp/sample"), "/app", writable=True)`."""

    source: Path  # outside
    target: str  # inside
    writable: bool = False


class PythonTool:
    """Runs code, at most `parallel` at a time.

    As root every run is of the one user `sandbox.NOBODY`, whose processes the kernel counts together.

    Usage:
        await PythonTool(Limits(), parallel=2).run("print(6 * 7)")  # '42'
    """

    def __init__(self, limits: Limits, *, parallel: int, walls: bool = True) -> None:
        self._limits = limits
        self._parallel = parallel
        self._places = asyncio.Semaphore(parallel)
        self._walls = walls

    async def run(self, code: str, mounts: Sequence[Mount] = ()) -> str:
        """What the code printed on standard output and error, and how it ended where that was not well.

        mounts: folders that it has besides its own, which need walls.
        Raises NoWalls where the kernel gives no namespaces, and ScorerUnready where no process can be started.
        """
        async with self._places:
            ended, output = await self._run(code, mounts)
        if ended == UNWALLED and self._walls:
            raise NoWalls(output.strip())
        text = output.strip()[: self._limits.output]
        if ended is None:
            return f"{text}\n[stopped after {self._limits.seconds:g} seconds]".strip()
        if ended != 0 and "Traceback" not in text and "Error" not in text:
            return f"{text}\n[ended with code {ended}]".strip()
        return text

    async def _run(self, code: str, mounts: Sequence[Mount]) -> tuple[int | None, str]:
        """Exit code, None where it was killed at its deadline; and the beginning of the output."""
        try:
            folder = tempfile.mkdtemp(prefix="streamrl-tool-")
        except OSError as error:
            raise ScorerUnready(f"no directory could be made for code: {error}") from None
        try:
            process, output = await self._start(folder, mounts), bytearray()
            ended = None
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await exchange(process, code.encode(errors="replace"), 4 * self._limits.output, output)
                    ended = await process.wait()
            except TimeoutError:
                pass  # what it has printed is told
            finally:
                await kill(process)  # with its first process everything in its PID namespace
            return ended, output.decode(errors="replace")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _start(self, folder: str, mounts: Sequence[Mount]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SANDBOX), self._settings(folder, mounts)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8:replace"},
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise ScorerUnready(f"no process could be started for code: {error}") from None

    def _settings(self, folder: str, mounts: Sequence[Mount] = ()) -> str:
        limits, is_root = self._limits, os.getuid() == 0
        return json.dumps(
            {
                "walls": self._walls,
                "user_namespace": not is_root,
                "folder": folder,
                "mounts": [[str(each.source), each.target, "rw" if each.writable else "ro"] for each in mounts],
                "memory": limits.memory,
                "cpu_seconds": max(1, round(limits.seconds)),
                "file_size": limits.file_size,
                "processes": limits.processes * (self._parallel if is_root else 1),
            }
        )


def missing_walls() -> str | None:
    """Why the tool has no walls on this machine; None where it has them. Takes a tenth of a second."""
    folder = tempfile.mkdtemp(prefix="streamrl-tool-")
    settings = PythonTool(Limits(), parallel=1)._settings(folder)
    command = [sys.executable, "-I", "-S", str(SANDBOX), settings]
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=WALLS_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no walls in {WALLS_TIMEOUT:g} seconds"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done.stderr.strip() if done.returncode == UNWALLED else None
