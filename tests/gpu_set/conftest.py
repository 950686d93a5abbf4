"""Tests of the whole GPU requirement set on a machine without a GPU: `make test-gpu-set` runs them, no other target."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    # The ordinary environment has none of what these tests import.
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests

    import faked_engine

    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # Megatron's fused functions as they are written: no compiler is needed
    faked_engine.install()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder(family)`: the folder of a tiny model with random weights, made once."""
    from benchmarks.random_models import write_model

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., object]]:
    """`learner(folder, **settings)`: an EngineLearner; a former one is ended first."""
    from engine_learner import EngineLearner

    with contextlib.ExitStack() as stack:

        def make(folder: Path, **settings: object) -> EngineLearner:
            stack.close()
            return stack.enter_context(EngineLearner.started(folder, monkeypatch, **settings))

        yield make
