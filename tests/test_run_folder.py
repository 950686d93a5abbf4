"""A role of a run is one process at a time, whatever became of its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from streamrl.config.file import ConfigError
from streamrl.run_folder import claim
from tests.operations_table import documented

HOLDER = """
import sys, time
from pathlib import Path
from streamrl.run_folder import claim
claim(Path(sys.argv[1]), "replay-0", 5)
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is the run's replay service."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_of_a_role_is_refused_after_its_patience(holder, tmp_path):
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path, "replay-0", timeout=0.3)
    documented("...: another process is ... of this run and does not end; allowed: one of each", str(refused.value), 2)
    os.close(claim(tmp_path, "learner-0", timeout=0.3))  # another role is free


def test_a_role_is_free_once_the_process_that_had_it_is_killed(holder, tmp_path):
    claimed = threading.Event()

    def wait() -> None:
        os.close(claim(tmp_path, "replay-0", timeout=20))
        claimed.set()

    threading.Thread(target=wait).start()
    time.sleep(0.3)
    assert not claimed.is_set()
    holder.send_signal(signal.SIGKILL)
    assert claimed.wait(10)
