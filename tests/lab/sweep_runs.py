"""Sweep files for tests, and what runs them: nothing that trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.sweep import runner
from streamrl.lab.sweep.plan import read
from streamrl.observe.events import event_path

MakeSweep = Callable[..., Path]


def sweep_maker(folder: Path, model: Path) -> MakeSweep:
    """`make(grid=..., seeds=...)`: a sweep file whose runs need servers of their own, so that none is started."""
    (folder / "base.yaml").write_text(
        f"generate: {{attach: ['http://127.0.0.1:1']}}\nrun: {{steps: 3}}\nmodel: {{path: {model}}}\n"
    )

    def make(**tree: object) -> Path:
        file = folder / "mine.yaml"
        file.write_text(
            yaml.safe_dump({"base": "base.yaml", "folder": str(folder / "sweeps"), **tree}, sort_keys=False)
        )
        return file

    return make


def end_run(folder: Path, steps: int) -> None:
    """The events by which the replay service says that a run has come to its end."""
    events = [{"event": "learner.finished", "version": f"{steps}.0"}, {"event": "replay.stop", "code": 0}]
    path = event_path(folder, "replay")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"time": 0.0, "role": "replay-0", **each}) + "\n" for each in events))


class Trained:
    """Replaces `streamrl train`: writes what a run with this configuration would leave, as told."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.runs: list[str] = []

    def __call__(self, config: Config) -> int:
        self.runs.append(config.run.name)
        code = self.codes.get(config.run.name, 0)
        folder = config.run_folder
        folder.mkdir(parents=True, exist_ok=True)
        config_file.save(config, folder / "config.yaml")
        if code == 0:
            rows = [row(step, config.run.seed) for step in range(1, config.run.steps + 1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
            end_run(folder, config.run.steps)
        return code


def row(step: int, seed: int = 1, **more: float) -> dict[str, float]:
    return {
        "step": step, "reward/mean": seed / 10 + step / 100, "pass_rate": 0.5, "tokens/trained": 100,
        "tokens/generated": 200, "time/step": 2.0, "staleness/mean": 1.0, "staleness/max": 2, "offpolicy/ess": 0.9,
        "offpolicy/kl": 0.01, "weights/masked": 0.0, "idle/learner": 0.25, "idle/generator": 0.5,
        "tokens/trained/s0": 25, "tokens/trained/s1": 75, **more,
    }  # fmt: skip


def run(file: Path, trained: Trained, *overrides: str) -> list[str]:
    """Run what is not done. Returns the names of the runs that failed."""
    sweep = read(file, overrides)
    return runner.run_jobs(sweep, sweep.jobs(), trained)
