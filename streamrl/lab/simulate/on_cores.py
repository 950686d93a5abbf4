"""A command of streamrl that runs to its end, each of its roles on cores of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from streamrl.lifeline import die_with, end_tree, sigterm_afterwards, unwinding_at_sigterm

PIN_PERIOD = 0.5  # seconds between two looks for new processes and threads

END_GRACE = 60.0  # seconds for a command to end: a run saves a checkpoint

# Cores of generation (worker and server), cores of the learner.
Cores = tuple[set[int], set[int]]


class RunEndedError(RuntimeError):
    """A run failed; the text has the last lines of what it printed."""


def run_command(
    command: Sequence[str], log: Path, timeout: float, cores: Cores | None, environment: Mapping[str, str] | None = None
) -> None:
    """Run it with its output behind that in `log`; `cores` None: wherever the kernel puts it.

    Raises RunEndedError where it fails, or takes more than `timeout` seconds. At SIGTERM it ends with the caller; where
    that is killed, it gets SIGTERM. What has not ended END_GRACE seconds after it was asked to is killed.
    """
    with log.open("ab") as output, unwinding_at_sigterm():
        process, late = None, False
        try:
            with sigterm_afterwards():
                process = psutil.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})},
                    preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGTERM),
                )  # fmt: skip
            deadline = time.monotonic() + timeout
            while process.poll() is None and not (late := time.monotonic() > deadline):
                if cores is not None:
                    _pin_all((process.pid, *_children(process.pid)), cores)
                time.sleep(PIN_PERIOD)
        finally:
            if process is not None and process.poll() is None:
                end_tree(process.pid, timeout=END_GRACE)
        code = process.wait(END_GRACE)
    if code or late:
        lines = log.read_text(errors="replace").splitlines()
        ended = f"took more than {timeout:.0f} s" if late else f"ended with {code}"
        raise RunEndedError(f"{' '.join(command)}\n{ended}:\n" + "\n".join(lines[-20:]))


def _pin_all(roles: Sequence[int], cores: Cores) -> None:
    for role in roles:
        if (own := _cores_of(role, cores)) is not None:
            pin(role, own)


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _cores_of(role: int, cores: Cores) -> set[int] | None:
    """Those of a role by its command line; None for one that may run anywhere."""
    try:
        words = psutil.Process(role).cmdline()
    except psutil.Error:
        return None
    if "generator" in words:
        return cores[0]
    return cores[1] if {"learner", "retrain"} & set(words) else None


def pin(pid: int, cores: set[int]) -> None:
    """A process, all that it started, and every thread of them. What is begun later inherits it."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), cores)
