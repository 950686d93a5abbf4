"""Tasks around another one ask the prompts of that one, and as many."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.registry import build_task

INNER: dict[str, Any] = {"name": "copy"}
AROUND: dict[str, dict[str, Any]] = {
    "agent": {"command": "true"},
    "remote": {"url": "http://127.0.0.1:1"},
    "tools": {"tools": ["calculator"]},
}


@pytest.mark.parametrize("split", ["train", "probe"])
@pytest.mark.parametrize("name", AROUND)
def test_a_task_around_another_one_has_as_many_prompts_as_that(name, split):
    around = build_task(TaskConfig(name=name, args={"task": INNER, **AROUND[name]}), 1, split)
    inner = build_task(TaskConfig(**INNER), 1, split)
    assert inner.size is not None
    assert around.size == inner.size
