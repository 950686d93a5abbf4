"""Adapters through the run folder: what is written, what is kept, and a disk that takes no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config.learner import LoraConfig
from streamrl.publish.adapter_source import AdapterSource
from streamrl.publish.peft import WEIGHTS, tensor_name
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import PublishError
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.limited_files import limited_files

STATE = ServerState(name="server-0", version=PolicyVersion(0))
NAME = tensor_name(0, "self_attn.q_proj", "A")


def source_in(run_folder: Path) -> AdapterSource:
    return AdapterSource(run_folder, LoraConfig(rank=4), Path("models/tiny"))


def staged_of(step: int, incarnation: int = 0) -> Staged:
    return Staging(1 << 16).fill(PolicyVersion(step, incarnation), [(NAME, torch.full((4, 4096), float(step)))])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_two_versions_that_were_written_last_are_kept_also_after_a_return_to_a_checkpoint(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    for written, (step, incarnation) in enumerate([(8, 0), (9, 0), (10, 0), (6, 1), (7, 1)]):
        manifest = source.manifest(STATE, staged_of(step, incarnation))
        os.utime(manifest["folder"], (written, written))
    assert names_in(tmp_path / "adapters") == ["6.1", "7.1"]
    assert load_file(tmp_path / "adapters" / "7.1" / WEIGHTS)[NAME].unique().tolist() == [7.0]


def test_a_version_that_a_full_disk_does_not_take_is_told_and_leaves_nothing_until_it_is_tried_again(
    tmp_path: Path,
) -> None:
    source = source_in(tmp_path)
    source.manifest(STATE, staged_of(1))
    with limited_files(1000), pytest.raises(PublishError, match=r"version 2\.0 was not written: "):
        source.manifest(STATE, staged_of(2))
    assert names_in(tmp_path / "adapters") == ["1.0"]
    source.manifest(STATE, staged_of(2))
    assert names_in(tmp_path / "adapters") == ["1.0", "2.0"]


def test_what_a_learner_that_was_killed_has_half_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "adapters" / f".1.0.{os.getpid() + 1}").mkdir(parents=True)
    source_in(tmp_path)
    assert names_in(tmp_path / "adapters") == []
