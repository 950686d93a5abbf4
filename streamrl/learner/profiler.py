"""torch's profiler over a range of learner steps, on chosen ranks: RUN/profile/rank_0_steps_3-5.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from streamrl.config.learner import ProfileConfig
from streamrl.device import Device

log = logging.getLogger(__name__)


class Profiler:
    """Records the configured steps of this rank, and writes them as Chrome's JSON when the last of them is over.

    Usage:
        profiler = Profiler(config.learner.profile, run_folder / "profile", rank, device)
        with profiler.step(3):
            ...
        profiler.close()
    """

    def __init__(self, settings: ProfileConfig, folder: Path, rank: int, device: Device) -> None:
        self._first, self._last = settings.first_step, settings.last
        self._mine = rank in settings.ranks
        self._folder = folder
        self._rank = rank
        self._device = device
        self._profile: profile | None = None
        self._recorded: list[int] = []  # the steps that are in it

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the work of learner step `step`, as the metrics count them, from 1."""
        wanted = self._mine and self._first is not None and self._first <= step <= self._last
        if wanted:
            self._start()
            self._recorded.append(step)
        yield
        if wanted and step == self._last:
            self.close()

    def close(self) -> None:
        """Write what is recorded, where a run ends within the range, too. May be called twice."""
        if self._profile is None:
            return
        self._device.synchronize()
        self._profile.stop()
        path = self._folder / f"rank_{self._rank}_steps_{self._recorded[0]}-{self._recorded[-1]}.json"
        draft = path.with_name(f".{path.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(draft))
            os.replace(draft, path)
            log.info("profile: %s", path)
        except OSError as error:  # training goes on without its picture
            log.error("learner.profile: %s: %s", path, error.strerror)
        self._profile = None

    def _start(self) -> None:
        if self._profile is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.kind == "cuda" else [])]
            self._profile = profile(activities=kinds)
            self._profile.start()
