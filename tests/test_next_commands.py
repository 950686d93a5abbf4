"""What a run prints at its end: where the model is, and commands that this folder's shell takes as they are."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.next_commands import closing_lines, interrupted_line

NAME = "it's a-run"  # of the folder around the run: a shell needs quotes for it


def make(folder: Path, model: str | None = "20.0", **sections: object) -> tuple[Config, Path]:
    """A complete run of 20 steps with its checkpoint, and a model of version `model`."""
    config = Config.model_validate({"run": {"name": "run", "folder": folder, "steps": 20}, **sections})
    run = config.run_folder
    (run / "checkpoints" / "step_20").mkdir(parents=True)
    config_file.save(config, run / "config.yaml")
    if model is not None:
        (run / "model").mkdir()
        save_file({"a": np.zeros(1)}, run / "model" / "model.safetensors", metadata={"version": model})
    return config, run


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in lines[1:]]


def test_every_line_is_a_command_that_parses_from_the_present_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keeping = {"publish": {"keep_every": 1}, "journal": {"keep": "all"}}
    lines = closing_lines(*make(tmp_path / NAME, **keeping))
    assert len(lines) <= 8
    assert lines[0] == f"The trained model is in {shlex.quote(f'{NAME}/run/model')}:"
    found = commands(lines)
    for words in found:
        if Path(words[0]).name == "streamrl":
            options = cli._parse(words[1:])
            named = getattr(options, "run", None) or getattr(options, "run_folder", None) or options.config
            assert (named[0] if isinstance(named, list) else named).exists()
    names = {words[1] for words in found if Path(words[0]).name == "streamrl"}
    assert names == {"eval", "report", "audit", "train"}
    server, code = (words for words in found if Path(words[0]).name != "streamrl")
    assert (Path(server[server.index("--model-path") + 1]) / "model.safetensors").exists()
    compile(code[2], "line", "exec")
    assert f'"{NAME}/run/model"' in code[2]
    assert found[-1][-1] == "run.steps=40"


def test_a_run_that_is_elsewhere_is_named_by_its_whole_path(tmp_path, monkeypatch):
    config, run = make(tmp_path / "there")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert f"streamrl eval --run-folder {run}  #" in "\n".join(closing_lines(config, run))


@pytest.mark.parametrize(
    ("learner", "key"),
    [({}, "model.path=runs/run/model"),
     ({"lora": {"rank": 4, "publish": "adapter"}}, "learner.lora.adapter=runs/run/adapter"),
     ({"lora": {"rank": 4}}, "model.path=runs/run/model")],
)  # fmt: skip
def test_a_schedule_that_ends_with_the_run_is_followed_by_a_new_run_from_its_model(learner, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "run-2").mkdir(parents=True)
    lines = closing_lines(*make(tmp_path / "runs", learner={"optimizer": {"decay": "cosine"}, **learner}))
    assert commands(lines)[-1][1:] == ["train", "runs/run/config.yaml", "run.name=run-3", key]


@pytest.mark.parametrize(("model", "target"), [(None, "runs/run/model"), ("10.0", "runs/run/model-20")])
def test_without_a_model_of_the_last_step_the_command_that_makes_one_is_printed(model, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = closing_lines(*make(tmp_path / "runs", model))
    convert = commands(lines)[0][1:]
    assert convert == ["convert", "runs/run/checkpoints/step_20", target]
    assert not [line for line in lines if " eval " in line or "model-path" in line]


def test_an_interrupted_run_says_where_its_newest_checkpoint_is_and_what_makes_a_model_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, run = make(tmp_path / "runs", None)
    line = interrupted_line(run)
    assert line.startswith("the newest checkpoint is runs/run/checkpoints/step_20; this makes a model of it: ")
    assert line.endswith("streamrl convert runs/run/checkpoints/step_20 runs/run/model")
    (run / "checkpoints" / "step_20").rmdir()
    assert interrupted_line(run) is None
