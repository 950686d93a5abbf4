"""What the learner's ranks find in their environment on a machine with GPUs."""

from __future__ import annotations

import os

import pytest

from streamrl import cli, commands, supervisor
from streamrl.config.file import load
from streamrl.lab import retrain
from streamrl.learner import role
from streamrl.learner_environment import learner_environment
from streamrl.supervisor import Supervisor

SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
IN_ORDER = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
CUT = ["learner.ranks=2", "learner.layout.tensor=2"]


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SEGMENTS, *IN_ORDER, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("overrides", "present", "expected"),
    [
        ([], {}, SEGMENTS),
        (CUT, {}, SEGMENTS | IN_ORDER),
        (["learner.ranks=2", "learner.layout.context=2"], {}, SEGMENTS | IN_ORDER),
        (["learner.ranks=2", "learner.layout.pipeline=2"], {}, SEGMENTS),
        (CUT, {"PYTORCH_ALLOC_CONF": ""}, IN_ORDER),
        (CUT, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, IN_ORDER),
        (CUT, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, SEGMENTS),
    ],
)
def test_ranks_get_what_their_layout_needs_and_the_user_has_not_set(overrides, present, expected):
    assert learner_environment(load(None, overrides), present) == expected


@pytest.mark.parametrize("gpus", [0, 8])
def test_train_gives_it_to_the_learner_alone_and_only_where_there_are_gpus(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "has_cuda", lambda: gpus > 0)
    monkeypatch.setattr(supervisor, "visible_gpus", lambda: tuple(map(str, range(gpus))))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    roles = Supervisor(load(None, [*CUT, f"run.folder={tmp_path}"]), tmp_path / "run").roles
    found = {each.name: {name for name in (*SEGMENTS, *IN_ORDER) if name in each.environment} for each in roles}
    assert found == {"replay-0": set(), "generator-0": set(), "learner-0": set(IN_ORDER) if gpus else set()}


@pytest.mark.parametrize("gpus", [False, True])
def test_a_rank_that_a_cluster_starts_sets_its_own(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "has_cuda", lambda: gpus)
    monkeypatch.setattr(commands, "_role", lambda options, name: (load(None, CUT), tmp_path))
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(role, "main", lambda config, folder: seen.append(dict(os.environ)) or 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert cli.main(["learner", "--run-folder", str(tmp_path)]) == 0
    (environment,) = seen
    assert (environment.items() >= (SEGMENTS | IN_ORDER).items()) is gpus


def test_training_again_on_several_ranks_sets_it_for_them(monkeypatch):
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, environment: started.append(environment))
    for gpus in (False, True):
        monkeypatch.setattr(retrain, "has_cuda", lambda gpus=gpus: gpus)
        retrain._under_torchrun(load(None, CUT))
    assert [each.items() >= (SEGMENTS | IN_ORDER).items() for each in started] == [False, True]
