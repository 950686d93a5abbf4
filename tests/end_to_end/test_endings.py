"""How real runs end that cannot go on: one line, its exit code, nothing left behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from streamrl.config import file as config_file
from streamrl.last_words import first_of
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.service import Service
from streamrl.run_folder import prepare
from tests.operations_table import documented

DEADLINE = 240.0


def told(folder: Path, role: str, name: str) -> list[dict]:
    path = event_path(folder, role)
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def by_torchrun(folder: Path, restarts: int = 0) -> list[str]:
    """One rank of the learner, as a cluster's script starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [*command, f"--max-restarts={restarts}", "-m", "streamrl.cli", "learner", "--run-folder", str(folder)]


@pytest.mark.slow
def test_a_missing_shard_is_one_line_of_the_learners_and_exit_code_2(make_run: Callable, tiny_model: Path, tmp_path):
    """`train` says it before anything starts; a rank that is started by itself says it above torchrun's frame."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    weights = load_file(model / "model.safetensors")
    run = make_run()
    folder = prepare(config_file.load(Path(run.command[-1]), [f"model.path={model}"]), fresh=False)
    (model / "model.safetensors").unlink()
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    lost = max(weights)
    save_file({name: weights[name] for name in weights if name != lost}, model / first, metadata={"format": "pt"})
    index = {"weight_map": {name: last if name == lost else first for name in weights}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    code, output = run.start(f"model.path={model}").finish()
    documented(
        "model.path: ... is missing, model.safetensors.index.json names it; allowed: a complete folder",
        output.splitlines()[-1],
        code,
    )
    learner = subprocess.run(by_torchrun(folder), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert learner.returncode == 1  # torchrun's
    word = first_of(learner.stderr.splitlines())
    assert word is not None
    assert (word.code, word.reason.startswith(f"model.path: {model / last} is missing")) == (2, True)


@pytest.mark.slow
def test_a_learner_that_is_refused_under_torchrun_loads_its_model_once_and_ends_with_2(
    tiny_model: Path, tmp_path: Path
):
    """As a cluster's script starts it."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{name: run, folder: {tmp_path}, steps: 3}}\nmodel: {{path: {tiny_model}}}\ntask: {{name: copy}}\n"
    )
    folder = prepare(config_file.load(file), fresh=False)
    (folder / "checkpoints" / "incarnation").write_text("one")
    command = [sys.executable, "-m", "launch.role", "--run-folder", str(folder), "--", *by_torchrun(folder, restarts=1)]
    learner = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    line = "...incarnation: ... is no number; allowed: ..."
    documented(line, learner.stderr, learner.returncode)
    assert len(told(folder, "learner", "learner.refused")) == 1
    assert sum(event["what"] == "builds the model" for event in told(folder, "learner", "starting")) == 1


@pytest.mark.slow
def test_ctrl_c_while_servers_and_ranks_start_ends_with_130_long_before_the_time_that_a_stop_may_take(make_run):
    run = make_run().start("run.stop_timeout=3600", "generate.workers=2", "replay.max_staleness=4")

    def starting() -> bool:
        names = [" ".join(_command(process)) for process in run.descendants]
        return any("engine.launch" in name for name in names) and any("cli learner" in name for name in names)

    run.wait_for(starting)
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert not told(run.folder, "learner", "ready")
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_a_real_learner_whose_generators_are_all_gone_ends_with_one_line_and_code_1(tiny_model: Path, tmp_path: Path):
    """As a cluster starts it: by torchrun, which would start it again three times, beside a service of its own."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{name: run, folder: {tmp_path}, steps: 3, start_timeout: 1, progress_timeout: 3}}\n"
        f"model: {{path: {tiny_model}}}\ntask: {{name: copy}}\n"
        "replay: {group_timeout: 2}\nstream: {reply_timeout: 2}\n"
    )
    config = config_file.load(file)
    folder = prepare(config, fresh=False)
    patient = config_file.load(file, ["run.progress_timeout=3000"])  # so that the learner speaks first
    service = Service(patient, folder, EventLog(event_path(folder, "replay"), "replay-0"))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(service.run()))
    thread.start()
    try:
        learner = subprocess.run(
            by_torchrun(folder, restarts=3), capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    finally:
        service.interrupt("the end of the test", 0)
        thread.join(DEADLINE)
    line = "no learner step in run.progress_timeout=3 s: step 0 has no batch"
    assert learner.returncode == 1
    said = [each for each in learner.stderr.splitlines() if each.startswith("streamrl failed: ")]
    assert set(said) == {f"streamrl failed: {line}"}
    assert len(told(folder, "learner", "process.start")) == 1  # the ranks that torchrun starts again have nothing to do
    assert codes == [1]  # the service is told of it, and with it everybody else
    assert [event["reason"] for event in told(folder, "replay", "gave_up")] == [line]


@pytest.mark.slow
def test_a_run_with_an_exit_interval_comes_to_its_end_in_as_many_starts(make_run):
    run = make_run(steps=4)
    for done in (2, 4):
        code, output = run.start("run.exit_interval=2").finish()
        assert code == 0, output
        assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, done + 1))
        assert (run.folder / "checkpoints" / f"step_{done}").is_dir()
        assert ("not complete: run.exit_interval=2 divides step 2; this resumes the run: " in output) == (done == 2)
    assert [event["version"] for event in told(run.folder, "replay", "learner.exited")] == ["2.0"]
    assert (run.folder / "model" / "config.json").is_file()
    assert all(0 < row["learner/mfu"] < 1 for row in read_metrics(run.folder))


@pytest.mark.slow
def test_a_run_of_which_no_answer_can_be_trained_ends_with_1_and_says_what_became_of_the_samples(make_run):
    """Each answer ends by the group's time: a run of placeholders is no run that is complete."""
    run = make_run(steps=3).start("replay.group_timeout=0.001", "replay.max_staleness=0")
    code, output = run.finish()
    assert code == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("streamrl: the run has done all of its steps and trained no token: of 48 samples 48 failed")
    assert sum(row["tokens/trained"] for row in read_metrics(run.folder)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["learner.finished"])
def test_a_learner_that_is_killed_when_it_has_finished_leaves_a_finished_run(make_run, moment):
    run = make_run(steps=3).start()
    run.wait_for(lambda: bool(told(run.folder, "learner", "process.start")))
    pid = told(run.folder, "learner", "process.start")[0]["pid"]
    deadline = time.monotonic() + DEADLINE
    while not told(run.folder, "replay", moment):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    psutil.Process(pid).send_signal(signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert len(told(run.folder, "learner", "process.start")) == 1


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
