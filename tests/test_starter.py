"""`streamrl init`: what it writes can be trained, for every built-in task that needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from launch import tiny_model
from streamrl import cli
from streamrl.choices import TASKS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.words import section_in
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.questions import Questions
from tests.operations_table import documented

OF_A_HUB = {name for name in TASKS.names if issubclass(TASKS.load(name), Questions) and name != "jsonl"}
OF_A_SERVER = {"remote", "judged", "openenv", "gymnasium", "verifiers", "harbor", "shapes"}  # or environment, model
HERE = [name for name in TASKS.names if name not in OF_A_HUB | OF_A_SERVER]
LONG = ("agent", "reasoning_gym", "tools")  # start processes, or import what takes seconds
DEADLINE = 280.0  # seconds, for a start of SGLang on two busy cores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "model"
    tiny_model.make(folder, 1)
    return folder


@pytest.mark.parametrize("task", [pytest.param(task, marks=pytest.mark.slow if task in LONG else ()) for task in HERE])
def test_what_is_written_for_a_task_would_start(task: str, model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tmp_path / "a first one"
    assert cli.main(["init", str(folder), "--task", task, "--model", str(model)]) == 0
    told = capsys.readouterr().out
    written = [line.strip() for line in told.splitlines() if line.startswith(f"  {folder}/")]
    assert sorted(Path(path) for path in written) == sorted(folder.iterdir())
    assert f"train '{folder}/config.yaml'" in told.splitlines()[-1]
    monkeypatch.chdir("/")  # the command works in any folder
    assert cli.main(["train", str(folder / "config.yaml"), "--dry-run"]) == 0, capsys.readouterr().err
    assert "nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize("task", sorted(OF_A_HUB | OF_A_SERVER))
def test_what_needs_something_from_elsewhere_is_a_configuration_that_fits(task: str, tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "first"), "--task", task]) == 0
    assert config_file.load(tmp_path / "first" / "config.yaml").task.name == task


def test_every_line_has_the_comment_of_its_key_in_the_tree(tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "first")]) == 0
    text = (tmp_path / "first" / "config.yaml").read_text()
    assert len(text.splitlines()) < 70
    known = descriptions(Config) | descriptions(TASKS.load("jsonl").Arguments)
    comments, above = list[str](), ""
    for line in map(str.strip, re.findall("^ .*$", text, re.MULTILINE)):
        behind = line.rpartition("  # ")[2] if "  # " in line else above
        if "  # " in line or not line.startswith("# ") or line.removeprefix("# ") not in known:  # a key, or one to be
            comments.append(behind)
        above = line.removeprefix("# ")
    assert len(comments) > 25
    assert [comment for comment in comments if comment not in known] == []


def descriptions(section: type[BaseModel]) -> set[str]:
    """Of every key and every section below."""
    found = {str(field.description) for field in section.model_fields.values()}
    for field in section.model_fields.values():
        if (nested := section_in(field.annotation)) is not None:
            found |= descriptions(nested)
    return found


def test_without_a_model_the_first_command_makes_one(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "first"]) == 0
    *_, make, train = capsys.readouterr().out.splitlines()
    assert make == f"  python -m launch.tiny_model {tmp_path}/models/tiny"
    assert train.endswith(f"train {tmp_path}/first/config.yaml")
    assert config_file.load(Path("first/config.yaml")).learner.optimizer.lr == 2e-3
    assert cli.main(["init", "second", "--model", "someone/a-model"]) == 0
    hub = config_file.load(Path("second/config.yaml"))
    assert (str(hub.model.path), hub.model.dtype, hub.learner.optimizer.lr) == ("someone/a-model", "bfloat16", 1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["there"], "FOLDER: there is not empty; allowed: a new folder"),
        (["there/file"], "FOLDER: there/file is not empty; allowed: a new folder"),
        (["there/file/below"], "FOLDER: there/file/below: "),
        (["new", "--task", "jsonnl"], "--task: 'jsonnl' is not allowed; allowed: one of agent, "),
    ],
)
def test_what_cannot_be_written_is_one_line(words: list[str], line: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/file").touch()
    assert cli.main(["init", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"streamrl: {line}")
    assert told.count("\n") == 1
    assert not Path("new").exists()
    if "--task" in words:
        assert "nearest known value: jsonl" in told
    else:
        documented("FOLDER: ...; allowed: ...", told, 2)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["jsonl", "agent"])
def test_two_steps_of_what_is_written_are_trained(task: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    assert cli.main(["init", str(folder), "--task", task, "--model", str(model)]) == 0
    command = [sys.executable, "-m", "streamrl.cli", "train", str(folder / "config.yaml"), "run.steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(read_metrics(folder / "runs" / "first"))
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["reward/mean"] < 1 for row in rows)
