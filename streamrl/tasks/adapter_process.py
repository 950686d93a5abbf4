"""The process of an adapter: started in its library's own virtual environment, and ended with the task.

    start ─▶ one line: its address, or what it refuses ─▶ ready ─▶ close
                                                            └──▶ it has ended ─▶ start, when it is next needed

It ends by itself when its standard input closes, however this process came to its end.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.lifeline import kill_group
from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.played_protocol import AboutPlayer, Started

ADAPTER = Path(__file__).with_name("foreign") / "adapter.py"

LARGEST = 1 << 16  # bytes of the line
CLOSE_TIMEOUT = 15.0  # seconds from the end of its input to its kill; its environment has ten of them


class AdapterProcess:
    """One adapter. `start` before the first call, `close` at the end.

    Usage:
        adapter = AdapterProcess(python, ["gymnasium", "guess.py:Guess"], start_timeout=120)
        adapter.start()
        await adapter.address()
    """

    def __init__(self, python: Path, words: Sequence[str], *, start_timeout: float) -> None:
        """python: interpreter of the virtual environment. words: of the adapter's command line."""
        self._command = [str(python), str(ADAPTER), *words, "--port", "0", "--with-parent"]
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self.url = ""
        self.about = AboutPlayer()

    def start(self) -> None:
        """Start it, and wait until it is ready. Raises ValueError, with one line, for what it refuses.

        Of one that was started before nothing is left.
        """
        self._end()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            python = self._command[0]
            raise ValueError(
                f"{ARGUMENTS}.python: {python}: {error.strerror}; allowed: the interpreter of a virtual environment"
            ) from None
        try:
            started = self._started()
        except BaseException:
            self._end()
            raise
        if started.url is None:
            self._end()
            raise ValueError(f"{ARGUMENTS}.{started.refused or 'environment: it said nothing'}")
        self.url, self.about = started.url, started.about

    async def address(self) -> str:
        """Where it listens; one that has ended is started again. Raises ScorerUnready."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                try:
                    await asyncio.to_thread(self.start)
                except ValueError as error:
                    raise ScorerUnready(str(error)) from None
            return self.url

    async def close(self) -> None:
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                await asyncio.to_thread(_end, process)

    def _started(self) -> Started:
        """The line that it says. Raises ValueError where it says none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + self._start_timeout
        with selectors.DefaultSelector() as said:  # `select` takes no descriptor above 1023
            said.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) < LARGEST:
                if not said.select(max(0.0, deadline - time.monotonic())):
                    raise ValueError(f"{ARGUMENTS}.environment: not loaded in {self._start_timeout:g} seconds")
                if not (read := os.read(self._process.stdout.fileno(), LARGEST)):
                    break
                line += read
        if not line:
            code = self._process.wait(CLOSE_TIMEOUT)
            raise ValueError(f"{ARGUMENTS}.python: {self._command[0]} ended with code {code}; its reason is above")
        try:
            return msgspec.json.decode(line, type=Started)
        except msgspec.DecodeError:
            raise ValueError(f"{ARGUMENTS}.python: {self._command[0]} is no interpreter: {line[:80]!r}") from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its input, and kill what is still there after a while, its children too."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(CLOSE_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    kill_group(process.pid)
    process.wait(CLOSE_TIMEOUT)
