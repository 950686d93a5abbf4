"""Real runs whose every choice is given by its path: one of the user's own, and one of what is built in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from streamrl.choices import FAMILIES, KINDS, OF_TASKS, SINKS, TASKS
from streamrl.config import file as config_file
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from tests.documented_commands import ROOT, commands
from tests.own_choices import OWN, PAGES, path_of, write_files

STEPS = 12
SMALL = (f"run.steps={STEPS}", "generate.group_size=4", "generate.groups_in_flight=8", "replay.groups_per_step=4")
DEADLINE = 500.0


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_model):
    """What a user has: files of their own, a model, the configuration of the quickstart."""
    write_files(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def streamrl(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "streamrl.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_of_the_pages_is_one_that_can_be_given(folder):
    for page in PAGES:
        for command in commands(ROOT / "docs" / page):
            if command.words[:2] == ("streamrl", "train"):
                config_file.load(folder / command.words[2], command.words[3:])


@pytest.mark.slow
def test_the_commands_of_the_pages_run_with_what_the_pages_show(folder):
    streamrl("train", "configs/quickstart.yaml", "run.name=own", *SMALL, *OWN)
    run = folder / "runs" / "own"
    rows = list(read_metrics(run))
    assert len(rows) == STEPS
    assert all(row["loss/kl_cov"] > 0 for row in rows)  # the regulariser's base names its metric
    assert json.loads((run / "environment.json").read_text())["warnings"] == []
    applied = [event for event in read_events(event_path(run, "generator", 0)) if event["event"] == "publish.apply"]
    assert applied
    assert f"{STEPS},reward/mean," in (run / "metrics.csv").read_text()
    assert list((folder / "fetched").rglob("model.safetensors"))  # through the worker's own disk
    assert "tokens audited" in streamrl("audit", "runs/own")
    assert "oldest_first" in (run / "config.yaml").read_text()
    streamrl("simulate", "runs/own", "replay.order=by_age.py:ByAge", "replay.order_options.oldest_first=false")
    planned = streamrl("plan", "configs/quickstart.yaml", *SMALL, *OWN)
    assert "fetched.py:Fetched" in planned


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE)
def test_a_run_with_everything_that_is_built_in_given_by_its_path(folder):
    config = config_file.load(folder / "configs" / "quickstart.yaml")
    keys = [kind for kind in KINDS if kind not in (FAMILIES, SINKS, *OF_TASKS) or kind is TASKS]
    paths = [f"{kind.key}={path_of(kind, config_file.value_at(config, kind.key))}" for kind in keys]
    paths.append(f"model.family={path_of(FAMILIES, 'qwen2')}")
    assert "publish.transport=streamrl.publish.transports.broadcast:Broadcast" in paths
    streamrl("train", "configs/quickstart.yaml", "run.name=by-path", *SMALL, *paths)
    assert len(list(read_metrics(folder / "runs" / "by-path"))) == STEPS
    assert "tokens audited" in streamrl("audit", "runs/by-path")
    streamrl("simulate", "runs/by-path", "replay.max_staleness=1")
    for command in (["plan", "configs/quickstart.yaml", *SMALL], ["plan", "configs/quickstart.yaml", *SMALL, *paths]):
        assert "broadcast" in streamrl(*command)
