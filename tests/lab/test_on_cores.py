"""A command that `streamrl tune` and the validation of the simulator run: how it ends."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from streamrl.lab.simulate import on_cores
from streamrl.lab.simulate.on_cores import RunEndedError, run_command

RUN = """
import sys
from pathlib import Path
from streamrl.lab.simulate.on_cores import run_command
run_command([sys.executable, "-c", "import time; time.sleep(600)"], Path(sys.argv[1]), 600, None)
"""
DEADLINE = 60.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_command_ends_with_its_caller(number: signal.Signals, code: int, tmp_path: Path) -> None:
    caller = psutil.Popen([sys.executable, "-c", RUN, tmp_path / "log"])
    deadline = time.monotonic() + DEADLINE
    while not (children := caller.children()):  # the signal may come before the caller knows that there is one
        assert caller.poll() is None
        assert time.monotonic() < deadline
    caller.send_signal(number)
    assert caller.wait(DEADLINE) == code
    assert psutil.wait_procs(children, DEADLINE)[1] == []


@pytest.mark.parametrize(
    ("words", "timeout", "said"),
    [("raise SystemExit('no such thing')", 60.0, "no such thing"), ("import time; time.sleep(600)", 0.1, "took more")],
)
def test_one_that_fails_or_is_late_ends_with_the_reason(words, timeout, said, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunEndedError, match=said):
        run_command([sys.executable, "-c", words], tmp_path / "log", timeout, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cores, "END_GRACE", 0.5)
    before = psutil.Process().children()
    words = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(RunEndedError, match="took more"):
        run_command([sys.executable, "-c", words], tmp_path / "log", 3.0, None)
    assert set(psutil.Process().children()) <= set(before)
