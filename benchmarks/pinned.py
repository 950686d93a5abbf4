"""Processes that stay on one core: what `on_core` starts, and everything that this starts in turn.

    python -m benchmarks.pinned CORE -m MODULE [ARGUMENT ...]

A measurement of two sides that share a machine says nothing as long as the kernel moves them about: each then takes
the other's core where it is free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def two_cores() -> tuple[int, int]:
    """The first two cores that this process may use. Raises SystemExit where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"two cores are needed, one for each side; this process may use {cores}")
    return cores[0], cores[1]


def on_core(core: int, command: Sequence[str]) -> list[str]:
    """`command`, which begins with the interpreter, behind a process that goes to `core` and then becomes it."""
    return [command[0], "-m", "benchmarks.pinned", str(core), *command[1:]]


def main() -> None:
    core, *arguments = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
