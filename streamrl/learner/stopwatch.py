"""Seconds of a part that comes again and again within a pass, on the device's own clock: the forward passes of a step.

A GPU works behind the host, so there the marks are CUDA events, which are read when the device is done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from streamrl.device import Device


class Stopwatch:
    """Adds up the blocks that ran under it.

    Usage:
        with stopwatch.running():
            model(row)
        device.synchronize()
        seconds = stopwatch.pop()
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seconds = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what the block gives the device to do."""
        if self._device.kind == "cpu":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._marks.append((begin, end))

    def pop(self) -> float:
        """Seconds since the last call. The device must be done with what was counted."""
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._marks) / 1000
        self._seconds = 0.0
        self._marks.clear()
        return seconds
