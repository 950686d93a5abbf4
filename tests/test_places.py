"""A run can be read, and gone on with, from any folder: its record has absolute paths."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch import tiny_model
from streamrl import cli, run_folder
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.places import absolute, load_run, train_again
from streamrl.stream.address import address_path

ROWS = "\n".join(f'{{"prompt": "{"abcdefgh"[number]}=", "answer": "a"}}' for number in range(8))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data, a reward function and a task, and the present one."""
    folder = tmp_path / "work"
    tiny_model.make(folder / "models/tiny", 1)
    (folder / "data").mkdir()
    (folder / "data/sums.jsonl").write_text(ROWS)
    (folder / "rewards.py").write_text("def exact(text, answer, row, finish_reason):\n    return 1.0\n")
    monkeypatch.chdir(folder)
    return folder


def relative(**task: object) -> Config:
    tree = {"run": {"name": "quick"}, "model": {"path": "models/tiny"}, "task": {"name": "copy", **task}}
    return Config.model_validate(tree)


def test_every_path_in_the_record_of_a_run_is_absolute(work):
    arguments = {"path": "data/sums.jsonl", "chat": False, "reward": "rewards.py:exact", "cache": "cache"}
    folder = run_folder.prepare(relative(name="jsonl", args=arguments), fresh=False)
    record = yaml.safe_load((folder / "config.yaml").read_text())
    assert folder == work / "runs/quick"
    assert (record["run"]["folder"], record["model"]["path"]) == (f"{work}/runs", f"{work}/models/tiny")
    assert record["task"]["args"] == {
        "path": f"{work}/data/sums.jsonl",
        "chat": False,
        "reward": f"{work}/rewards.py:exact",
        "cache": f"{work}/cache",
    }


def test_tasks_in_tasks_and_in_mixes_have_absolute_paths_too_and_hub_names_stay(work):
    inner = {"name": "jsonl", "args": {"path": "data/sums.jsonl"}}
    mix = [
        {"label": "a", "name": "tools", "args": {"task": inner, "tools": ["calculator", "own/tools.py:Populations"]}},
        {"label": "b", "name": "gsm8k", "args": {"path": "openai/gsm8k"}},
        {"label": "c", "name": "own/tasks.py:Sums"},
        {"label": "d", "name": "remote", "args": {"url": "http://h:1", "token_file": "token"}},
    ]
    shares = {share.label: share for share in absolute(relative(mix=mix)).task.mix}
    assert shares["a"].args["task"]["args"]["path"] == f"{work}/data/sums.jsonl"
    assert shares["a"].args["tools"] == ["calculator", f"{work}/own/tools.py:Populations"]
    assert shares["b"].args["path"] == "openai/gsm8k"
    assert shares["d"].args == {"url": "http://h:1", "token_file": f"{work}/token"}
    (work / "own").mkdir()
    (work / "own/tasks.py").write_text(
        "from streamrl.tasks.built_in.copy import Copy\nclass Sums(Copy):\n"
        "    def __init__(self, arguments, seed, split): ...\n"
    )
    shares = {share.label: share for share in absolute(relative(mix=mix)).task.mix}
    assert shares["c"].name == f"{work}/own/tasks.py:Sums"


def test_a_configuration_with_relative_paths_resumes_the_run_that_it_made(work):
    for _ in range(2):
        run_folder.prepare(relative(), fresh=False)
    assert [path.name for path in (work / "runs").iterdir()] == ["quick"]


def test_a_run_is_read_from_another_folder(work, tmp_path, monkeypatch, capsys):
    folder = run_folder.prepare(relative(), fresh=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", str(folder)]) == 1  # there is nothing to audit, and no traceback
    out = capsys.readouterr()
    assert "no token could be audited" in out.out + out.err
    assert not (tmp_path / "runs").exists()


def test_a_record_with_relative_paths_is_read_from_the_folder_that_its_run_lies_in(work, tmp_path, monkeypatch):
    folder = work / "runs/quick"
    folder.mkdir(parents=True)
    arguments = {"path": "data/sums.jsonl", "chat": False}
    config_file.save(relative(name="jsonl", args=arguments), folder / "config.yaml")
    monkeypatch.chdir(tmp_path)
    config = load_run(folder)
    assert (config.run_folder, config.model.path) == (folder, work / "models/tiny")
    assert config.task.args["path"] == f"{work}/data/sums.jsonl"


def test_a_folder_that_was_moved_with_its_models_is_read_where_it_is(work, tmp_path):
    run_folder.prepare(relative(), fresh=False)
    os.chdir(tmp_path)
    shutil.move(work, tmp_path / "elsewhere")
    config = load_run(tmp_path / "elsewhere/runs/quick")
    assert config.model.path == tmp_path / "elsewhere/models/tiny"
    assert config.run.folder == tmp_path / "elsewhere/runs"


def test_the_command_that_resumes_names_the_run_by_its_absolute_path(work, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert train_again(relative(), Path("runs/quick")) == f"streamrl train {work}/runs/quick/config.yaml"
    own = relative().model_copy(update={"replay": relative().replay.model_copy(update={"curriculum": "mine:Hard"})})
    assert train_again(own, Path("runs/quick")) == f"cd {work} && streamrl train {work}/runs/quick/config.yaml"


def test_the_printed_command_resumes_the_run_from_another_folder_also_after_fresh(work, tmp_path):
    """What is printed at Ctrl-C is run as it is printed, in another folder, and goes on with the same run."""
    (work / "config.yaml").write_text(
        "run: {name: quick, steps: 4000}\nmodel: {path: models/tiny}\ngenerate: {attach: ['http://127.0.0.1:9']}\n"
    )
    environment, run = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}, work / "runs/quick"
    command = [sys.executable, "-m", "streamrl.cli", "train", "config.yaml", "--fresh"]
    printed = interrupted(command, work, run, environment)
    line = next(line for line in printed.splitlines() if line.startswith("streamrl: interrupted"))
    again = line.partition("this resumes the run: ")[2]
    assert "--fresh" not in again
    words = again.split()
    assert words[1:] == ["train", f"{work}/runs/quick/config.yaml"]
    printed = interrupted([sys.executable, "-m", "streamrl.cli", *words[1:]], tmp_path, run, environment)
    assert f"streamrl: interrupted; this resumes the run: {again}" in printed
    assert [path.name for path in sorted((work / "runs").iterdir())] == [".quick.lock", "quick"]
    assert not (tmp_path / "runs").exists()


def interrupted(command: list[str], folder: Path, run: Path, environment: dict[str, str]) -> str:
    """Start `run` in `folder`, send SIGINT once its replay service listens, and give what it printed."""
    listens = address_path(run)
    listens.unlink(missing_ok=True)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not listens.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=120)[1]
