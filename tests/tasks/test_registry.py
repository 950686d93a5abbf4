"""Tasks by name, alone and in a mix."""

from __future__ import annotations

from streamrl.config.task import TaskConfig
from streamrl.tasks.registry import build_tasks


def test_a_mix_has_one_environment_for_each_weighted_label() -> None:
    mix = [
        {"name": "copy", "weight": 2},
        {"label": "long", "name": "copy", "args": {"length": 5}},
        {"name": "successor", "weight": 0},
    ]
    tasks = build_tasks(TaskConfig.model_validate({"mix": mix}), seed=1)
    assert list(tasks) == ["copy", "long"]
    assert len(tasks["copy"].prompt(0).answer or "") == 3
    assert len(tasks["long"].prompt(0).answer or "") == 5


def test_a_run_without_a_mix_has_its_one_task() -> None:
    assert list(build_tasks(TaskConfig(name="successor"), seed=1)) == ["successor"]
