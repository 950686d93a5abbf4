"""Fixtures of the learner's tests: models made once, trainers that are closed, ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # for learner_parts, which the ranks under torchrun import too

from learner_parts import write_model  # noqa: E402

from streamrl.config import Config  # noqa: E402
from streamrl.learner.trainer import Trainer  # noqa: E402


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
def torchrun() -> Callable[..., None]:
    """`torchrun(ranks, script, *arguments)`: a script of this folder on so many real ranks, until it has ended."""

    def run(ranks: int, script: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(FOLDER / script), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture
def two_ranks(tmp_path: Path, torchrun: Callable[..., None]) -> Callable[..., Any]:
    """`two_ranks(job, config, run_folder)`: what rank 0 of `learner.ranks` real ranks saved at the end of `job`."""

    def run(job: str, config: Config, run_folder: Path) -> Any:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        out = tmp_path / f"{job}.pt"
        torchrun(config.learner.ranks, "ranks_at_work.py", job, tmp_path / "config.json", run_folder, out)
        return torch.load(out)

    return run
