"""A run ends with RUN/model, killed at its end or not, and every command that it prints then runs."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.observe.ending import saved_model
from streamrl.observe.events import event_path, read_events
from tests.operations_table import documented

DEADLINE = 500.0  # seconds of one command; a start of SGLang on two busy cores may take a hundred


def assert_is_the_last_checkpoint(run: Path, step: int, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    command = [sys.executable, "-m", "streamrl.cli", "convert", str(run / "checkpoints" / f"step_{step}"), str(out)]
    subprocess.run(command, check=True, timeout=DEADLINE, capture_output=True)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "model", out))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert {path.name for path in (run / "model").iterdir()} == {path.name for path in out.iterdir()}
    assert saved_model(run).step == step


def test_the_model_of_a_finished_run_is_that_of_its_last_checkpoint(finished_run, tmp_path):
    assert_is_the_last_checkpoint(finished_run.folder, 8, tmp_path)


@pytest.mark.slow
def test_a_run_that_is_killed_behind_its_last_step_writes_its_model_when_it_is_started_again(make_run, tmp_path):
    run = make_run(steps=3).start()
    run.wait_for(lambda: run.steps() == 3)
    run.process.send_signal(signal.SIGKILL)
    run.finish()
    run.assert_nothing_is_left(within=60.0)
    code, output = run.start().finish()
    assert code == 0, output
    assert_is_the_last_checkpoint(run.folder, 3, tmp_path)


@pytest.mark.slow
def test_a_model_that_cannot_be_written_fails_the_run_and_the_same_command_writes_it_later(make_run, tmp_path):
    run = make_run(steps=3)
    run.folder.mkdir()
    (run.folder / ".model.partial").write_text("a file where the draft would be")
    code, output = run.start().finish()
    documented("... cannot be written: ...; the checkpoint of step ... is whole, ...", output.splitlines()[-1], code)
    (run.folder / ".model.partial").unlink()
    code, output = run.start().finish()
    assert code == 0, output
    names = [event["event"] for event in read_events(event_path(run.folder, "learner"))]
    assert names.count("learner.step") == 2 * 3, "a begin and an end each: no step is trained again for it"
    assert_is_the_last_checkpoint(run.folder, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_command_that_a_complete_run_prints_runs_in_the_folder_that_it_was_printed_in(make_run):
    run = make_run(steps=3)
    folder = run.folder.parent
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"}
    command = [*run.command, "evaluate.prompts=4", "evaluate.samples=4", "evaluate.k=[1]"]

    def shell(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"exec {line}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    printed = shell(shlex.join(command))
    lines = printed[printed.index("The trained model is in run/model:") :].splitlines()[1:]
    answers = {line.partition("# ")[2]: line for line in lines}
    assert len(answers) == 6
    for purpose, line in answers.items():
        if purpose == "serve it":
            assert_serves(line.partition("  #")[0], folder, environment)
        else:
            shell(line)
    assert saved_model(run.folder).step == 6  # the last of them has gone on


def assert_serves(line: str, folder: Path, environment: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "served.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line} --port {port}"], cwd=folder, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE
        while not answers(f"http://127.0.0.1:{port}/health_generate"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=20) as response:
            return response.status == 200
    except OSError:
        return False
