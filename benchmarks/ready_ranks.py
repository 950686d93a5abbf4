"""Ranks that start at once: copies of one process that has loaded torch and Megatron-Core already.

A rank is told what torchrun would tell it, in its environment. What torchrun itself does is not to be seen with these.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

LOADED = ["streamrl.learner.role"]
SAID = 4000  # characters of what a failed rank said last


def run(count: int, function: Callable[..., None], arguments: tuple[Any, ...], seconds: float) -> None:
    """Call a function on so many ranks, in a process each, until it has returned on all of them.

    Raises RuntimeError with what the first rank that failed said, TimeoutError after `seconds`; no rank is left then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(count)]
        ranks = [
            start(function, arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
            for rank, log in enumerate(logs)
        ]
        try:
            failed = _wait(ranks, seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if failed is not None:
            raise RuntimeError(f"rank {failed} of {count} failed:\n{logs[failed].read_text()[-SAID:]}")


def start(
    function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], log: Path
) -> ForkServerProcess:
    """A process that calls a function, with this environment besides its own, and writes to a log."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=_call, args=(function, arguments, environment, log))
    with _one_thread():
        process.start()
    return process


def run_program(script: Path, *arguments: str) -> None:
    """For `run` and `start`: a script as the main program of the process."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """What the process that all ranks are copies of finds in its environment, since it reads that only at its start."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(ranks: list[ForkServerProcess], seconds: float) -> int | None:
    """Until all have ended well, or one has not: its rank then, None otherwise. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        if not wait(running, max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"{len(ranks)} ranks are not done after {seconds:g} s")
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        if failed:
            return failed[0]
    return None


def _call(function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    function(*arguments)
