"""Fixtures of the learner's tests: models made once, trainers that are closed, real ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent
RANKS_TIMEOUT = 240.0  # seconds
sys.path.insert(0, str(FOLDER))  # for learner_parts, which the ranks import too

from learner_parts import make_batch, write_model  # noqa: E402

from benchmarks import ready_ranks  # noqa: E402
from streamrl.config import Config  # noqa: E402
from streamrl.learner.trainer import Trainer  # noqa: E402
from streamrl.types import Batch, PolicyVersion, VersionSpan  # noqa: E402


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder(family, tied)`: the folder of a tiny model, made once a session."""
    made: dict[tuple[str, bool], Path] = {}

    def get(family: str = "qwen2", tied: bool = False) -> Path:
        if (family, tied) not in made:
            made[family, tied] = write_model(tmp_path_factory.mktemp(f"{family}_{tied}"), family, tied)
        return made[family, tied]

    return get


@pytest.fixture
def two_answers() -> Batch:
    """Prompt [5, 6] with outputs [7, 8, 2] and [9, 2], by version 3, for step 4."""
    template = make_batch().groups[1]

    def sample(output: list[int]):
        return msgspec.structs.replace(
            template.samples[0],
            prompt_ids=np.array([5, 6], np.int32),
            output_ids=np.array(output, np.int32),
            logprobs=np.zeros(len(output), np.float32),
            loss_mask=np.ones(len(output), bool),
            spans=(VersionSpan(PolicyVersion(3), 0, len(output)),),
        )

    return Batch(
        step=4, groups=(msgspec.structs.replace(template, group_id=7, samples=(sample([7, 8, 2]), sample([9, 2]))),)
    )


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """`trainer_of(config, run_folder)`: a started trainer of one process; a former one is closed first."""
    running: list[Trainer] = []

    def make(config: Config, run_folder: Path | None = None) -> Trainer:
        while running:
            running.pop().close()
        # Without a run folder each trainer has a fresh one.
        running.append(Trainer(config, run_folder or tmp_path / f"run-{os.urandom(4).hex()}"))
        running[-1].restore_or_start()
        return running[-1]

    yield make
    for trainer in running:
        trainer.close()


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The process group of a process that is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def on_ranks() -> Callable[..., None]:
    """`on_ranks(count, script, *arguments)`: a script of this folder on so many real ranks, until it has ended."""

    def run(count: int, script: str, *arguments: object) -> None:
        ready_ranks.run(count, ready_ranks.run_program, (FOLDER / script, *map(str, arguments)), RANKS_TIMEOUT)

    return run


@pytest.fixture
def two_ranks(tmp_path: Path, on_ranks: Callable[..., None]) -> Callable[..., Any]:
    """`two_ranks(job, config, run_folder)`: what rank 0 of `learner.ranks` real ranks saved at the end of `job`."""

    def run(job: str, config: Config, run_folder: Path) -> Any:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        out = tmp_path / f"{job}.pt"
        on_ranks(config.learner.ranks, "ranks_at_work.py", job, tmp_path / "config.json", run_folder, out)
        return torch.load(out)

    return run
