"""Checks for the tests of `streamrl doctor --gpu`: each ends in another way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from streamrl.lab.acceptance.check import Bench, Failed, Measured, Skipped


def passes(bench: Bench, figure: str = "1") -> Measured:
    return Measured(figure, "1")


def skips(bench: Bench) -> Measured:
    raise Skipped("no such thing here")


def fails(bench: Bench) -> Measured:
    raise Failed("2, not 1")


def raises(bench: Bench) -> Measured:
    raise ValueError("what nobody thought of")


def dies(bench: Bench) -> Measured:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs(bench: Bench) -> Measured:
    """With a process of its own, whose id it leaves behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(bench.folder, "child").write_text(str(child.pid))
    time.sleep(600)
    raise AssertionError
