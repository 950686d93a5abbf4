"""Fixtures of the replay service's tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for service_parts

from service_parts import Running, ServiceProcess, make_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`start(clock, section={...})`: a service in a thread. A second one recovers what the first has left."""
    started: list[Running] = []

    def make(clock: Callable[[], float] = time.monotonic, **sections: dict[str, Any]) -> Running:
        started.append(Running(make_config(**sections), tmp_path, clock))
        return started[-1]

    yield make
    for running in started:
        running.close()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """`start_process(section={...})`: a service that can be killed and started again."""
    started: list[ServiceProcess] = []

    def make(**sections: dict[str, Any]) -> ServiceProcess:
        started.append(ServiceProcess(make_config(**sections), tmp_path))
        return started[-1]

    yield make
    for service in started:
        service.kill()
