"""The replay service under `launch.role`, from the folder that a node prepares to the signal of a scheduler."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import folder, role, tiny_model
from launch.description import load
from launch.render import Launch
from streamrl.stream.address import read_address

HERE = socket.gethostname()
TIMEOUT = 100.0  # seconds; a busy machine takes half a minute for the imports


@pytest.mark.slow
def test_a_prepared_run_is_served_at_the_told_name_until_sigterm_and_goes_on_afterwards(describe, tmp_path):
    model = tmp_path / "model"
    tiny_model.make(model)
    nodes = {"learner": {"nodes": 1, "gpus": 0}, "generators": {"nodes": 1, "gpus": 0}}
    path = describe(
        config={"model": {"path": str(model)}, "run": {"name": "trial"}},
        folder=str(tmp_path / "runs"),
        hosts=[HERE, "elsewhere"],
        port=_free_port(),
        **nodes,
    )
    made = Launch("hosts", *load(path), tmp_path)
    (tmp_path / "node.yaml").write_text(made.files()["config.yaml"])
    prepare = [sys.executable, "-m", "launch.folder", "prepare", str(tmp_path / "node.yaml")]
    told = subprocess.run(prepare, capture_output=True, text=True, timeout=TIMEOUT)
    run = Path(told.stdout.strip())
    assert (told.returncode, run) == (0, tmp_path / "runs/trial")
    assert folder.wait(made.config) == run

    for _ in range(2):  # the second time it is a run that goes on
        started = time.time()
        command = ["-m", "launch.role", "--run-folder", str(run), "--", sys.executable]
        command += ["-m", "streamrl.cli", "replay", "--run-folder", str(run)]
        process = subprocess.Popen([sys.executable, *command])
        try:
            while not folder.is_ready(run, "replay-0", since=started):
                assert process.poll() is None
                assert time.time() < started + TIMEOUT
                time.sleep(0.1)
            assert read_address(run) == f"tcp://{HERE}:{made.description.port}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == role.GOES_ON
        finally:
            process.kill()
        assert read_address(run) is None
    assert (run / "keys" / "service.key").exists()  # it listened on all addresses, so with CURVE


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
