"""How much memory a function takes at its peak, measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

DEADLINE = 600.0  # seconds
_RESET_PEAK = "5"  # proc(5), clear_refs: the peak becomes what is resident now


def peak_bytes(action: Callable[[], None]) -> int:
    """Bytes by which the peak of `action` exceeds what the process had before it: resident ones on a CPU.

    `action` can be pickled. Raises RuntimeError where it fails, or takes longer than DEADLINE.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(action, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE):
            raise RuntimeError(f"no peak of {action} in {DEADLINE:g} seconds")
        return int(ours.recv())
    except EOFError:
        raise RuntimeError(f"{action} failed") from None
    finally:
        process.kill()
        process.join()


def _measure(action: Callable[[], None], answer: Connection) -> None:
    torch.set_num_threads(1)
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # what torch loads at first use
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    action()
    answer.send(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
