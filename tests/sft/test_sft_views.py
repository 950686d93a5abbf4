"""What the commands that look at a run show of one without generators, and how it is known to be over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.next_commands import closing_lines, train_line
from streamrl.observe.console import one_line
from streamrl.observe.ending import is_over, resume_line
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.live import Glance
from streamrl.observe.metrics import MetricsWriter, read_metrics
from streamrl.sft.command import supervised

STEPS = 6


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Path]:
    """A complete run of six steps, as its learner leaves it."""
    given = {"run": {"folder": tmp_path, "steps": STEPS}, "sft": {"data": {"path": "rows.jsonl"}}}
    config = supervised(Config.model_validate(given))
    folder = config.run_folder
    (folder / "checkpoints" / f"step_{STEPS}").mkdir(parents=True)
    (folder / "model").mkdir()
    save_file({"a": np.zeros(1)}, folder / "model" / "model.safetensors", metadata={"version": f"{STEPS}.0"})
    config_file.save(config, folder / "config.yaml")
    events, metrics = EventLog(event_path(folder, "learner"), "learner-0"), MetricsWriter(folder)
    events.emit("ready", version="0.0")
    for step in range(1, STEPS + 1):
        with events.span("learner.step", step=step):
            pass
        row = {"step": step, "version": f"{step}.0", "time": 1e9 + step, "time/step": 1.0, "loss/total": 2.0 / step}
        metrics.write({**row, "tokens/trained": 100, "tokens/trained_per_s": 100.0, "lr": 1e-3, "rows/epoch": step / 4})
    events.emit("learner.finished", version=f"{STEPS}.0", code=0, reason="all steps are done")
    metrics.close()
    events.close()
    return config, folder


def test_its_learner_says_that_it_is_over_and_a_longer_one_goes_on(run):
    _, folder = run
    assert is_over(folder, STEPS)
    assert not is_over(folder, STEPS + 1)
    assert resume_line(folder, 9) == f"{folder} was done at step {STEPS}, and goes on to step 9"
    EventLog(event_path(folder, "learner"), "learner-0").close()  # it was started again
    assert not is_over(folder, STEPS)


def test_console_top_and_report_show_its_loss_and_nothing_of_generators(run, capsys):
    config, folder = run
    line = one_line(list(read_metrics(folder)), config, Glance())
    assert line.startswith("step 6 of 6, 1.00 s each | loss 0.")
    assert line.endswith("| trained 100/s")
    assert cli.main(["top", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "ended with exit code 0: all steps are done" in shown
    assert not [
        word for word in ("reward", "staleness", "held up", "buffer") if word in shown.split("the last steps")[0]
    ]
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert '"status": "all steps are done"' in page or '"status":"all steps are done"' in page


def test_its_last_lines_lead_to_reinforcement_learning_from_its_model(run, monkeypatch):
    config, folder = run
    monkeypatch.chdir(folder.parent)
    Path("mine.yaml").touch()
    lines = closing_lines(config, folder)
    assert "streamrl sft run/config.yaml run.steps=12  #" in lines[-1]
    assert not [line for line in lines if "audit" in line]
    line = train_line(config, folder, Path("mine.yaml"))
    assert "streamrl train mine.yaml run.name=run-2 model.path=run/model  #" in line
    assert train_line(config, folder, Path("run/config.yaml")) is None


@pytest.mark.parametrize("command", ["audit", "retrain --output new", "simulate"])
def test_what_needs_groups_refuses_it_in_one_line(command, run, monkeypatch, capsys):
    _, folder = run
    monkeypatch.chdir(folder.parent)
    name, *more = command.split()
    assert cli.main([name, str(folder), *more]) == 2
    assert capsys.readouterr().err.endswith(
        "a run of `streamrl sft` has no groups; allowed: a run of `streamrl train`\n"
    )
