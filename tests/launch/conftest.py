"""Descriptions of launches, as a person would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.description import load
from launch.render import Launch

Describe = Callable[..., Path]
Make = Callable[..., Launch]


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """`describe(learner={...}, run={...}, **others)`: the path of a description, with a configuration beside it."""

    def write(*, config: dict[str, Any] | None = None, **description: Any) -> Path:
        base = {"model": {"path": "/shared/models/tiny"}, "run": {"name": "trial"}}
        tree = base | (config or {})
        tree["model"] = {"dtype": "bfloat16"} | tree["model"]  # GPUs serve no float32
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"config": "config.yaml", "folder": "/shared/runs", **description}))
        return path

    return write


@pytest.fixture
def launch(describe: Describe, tmp_path: Path) -> Make:
    """`launch(form, nodes=2, **others)`: what is rendered for half of the nodes as learner, half as generators."""

    def make(form: str, nodes: int = 2, **others: Any) -> Launch:
        learners = max(1, nodes // 2)
        config = {"learner": {"ranks": 4 * learners}, "generate": {"workers": 2 * learners, "tensor_parallel": 2}}
        roles: dict[str, Any] = {"learner": {"nodes": learners, "gpus": 8}}
        if nodes > 1:
            roles["generators"] = {"nodes": nodes - learners, "gpus": 8 if form == "slurm" else 4}
        hosts = [f"gpu-{number}" for number in range(nodes)]
        path = describe(config=others.pop("config", config), **({"hosts": hosts} | roles | others))
        return Launch(form, *load(path), tmp_path / "out")

    return make
