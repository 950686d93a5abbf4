"""Descriptors that are kept back, and the limit of open files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from streamrl.observe.descriptors import Reserve

LIMIT = """
import resource
from streamrl.observe import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))
told = descriptors.raise_limit()
print(told, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard", "expected"), [(300, "300 300 300"), (1000, "1000 1000 1000")])
def test_the_limit_is_raised_as_far_as_it_may(hard: int, expected: str) -> None:
    told = subprocess.run([sys.executable, "-c", LIMIT.format(hard=hard)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == expected


def test_a_file_is_opened_out_of_the_reserve_when_there_is_no_other_descriptor(exhaust: Callable[[], None]) -> None:
    reserve = Reserve(2)
    try:
        exhaust()
        first = reserve.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        second = reserve.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            reserve.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        os.close(first)  # given back: the next attempt keeps it again
        os.close(second)
        os.close(reserve.attempt(lambda: os.open(os.devnull, os.O_RDONLY)))
    finally:
        reserve.close()


def test_another_error_is_not_tried_twice() -> None:
    reserve, calls = Reserve(1), []

    def fail() -> None:
        calls.append(1)
        raise OSError(errno.ENOENT, "gone")

    with pytest.raises(OSError, match="gone"):
        reserve.attempt(fail)
    assert len(calls) == 1
    reserve.close()
