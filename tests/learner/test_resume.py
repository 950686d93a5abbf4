"""A run resumes from the newest checkpoint that is whole, and from nothing that is another run's or damaged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import make_batch, make_config, weights

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner import checkpoint
from streamrl.learner.checkpoint_files import files_of, sum_of
from streamrl.learner.trainer import Trainer
from streamrl.stream.identity import AnotherRun
from streamrl.types import Ledger
from tests.operations_table import GOES_ON, documented

Damage = Callable[[Path], None]


def flip(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 4
    path.write_bytes(content)


def shard(folder: Path) -> Path:
    """The file with the weights and moments of the only rank."""
    (path,) = folder.glob("*.distcp")
    return path


@pytest.fixture
def config(model_folder: Any) -> Config:
    return make_config(model_folder("qwen2", True))


@pytest.fixture
def restart(config: Config, trainer_of: Any, tmp_path: Path) -> Callable[[], Trainer]:
    """A learner that starts, or starts again, in the same run folder."""
    return lambda: trainer_of(config, tmp_path)


@pytest.fixture
def two(restart: Callable[[], Trainer]) -> dict[int, dict[str, torch.Tensor]]:
    """A run with checkpoints of steps 1 and 2; the weights of both."""
    trainer = restart()
    kept = {}
    for step in range(2):
        trainer.train_step(make_batch(step))
        kept[step + 1] = weights(trainer)
        trainer.save(Ledger(below=8 * (step + 1)))
        trainer.saved(wait=True)
    return kept


def test_a_checkpoint_names_every_file_of_it_as_it_is_on_the_disk(config: Config, trainer_of: Any, tmp_path: Path):
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export_each": True})})
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    (saved,) = trainer.saved(wait=True)
    assert sorted([*saved.files, "checkpoint.json"]) == files_of(saved.folder)
    assert {"common.pt", ".metadata", "huggingface/model.safetensors", shard(saved.folder).name} < saved.files.keys()
    assert saved.files == {name: sum_of(saved.folder / name) for name in saved.files}
    assert saved.run == json.loads((tmp_path / "run.json").read_text())["id"]


def drop(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def said(content: bytes) -> Damage:
    return lambda folder: (folder / "checkpoint.json").write_bytes(content)


def describe(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another content of checkpoint.json that is JSON still."""

    def write(folder: Path) -> None:
        fields = json.loads((folder / "checkpoint.json").read_text())
        change(fields)
        (folder / "checkpoint.json").write_text(json.dumps(fields))

    return write


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: flip(shard(folder), shard(folder).stat().st_size // 2), "distcp does not match its checksum"),
        (lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-1]), "distcp has .* bytes of"),
        pytest.param(lambda folder: shard(folder).unlink(), "distcp is gone", marks=pytest.mark.slow),
        (lambda folder: flip(folder / "common.pt"), "common.pt does not match its checksum"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata has 0 bytes of"),
        pytest.param(drop("metadata.json"), "metadata.json is gone", marks=pytest.mark.slow),
        (drop("checkpoint.json"), "checkpoint.json is gone"),
        (said(b'{"format": 4, "vers'), "checkpoint.json cannot be read"),
        pytest.param(said(b""), "checkpoint.json cannot be read", marks=pytest.mark.slow),
        pytest.param(said(b"\x00\xff" * 99), "checkpoint.json cannot be read", marks=pytest.mark.slow),
        pytest.param(said(b"[1]"), "checkpoint.json cannot be read", marks=pytest.mark.slow),
        (describe(lambda fields: fields["ledger"].update(below=24)), "checkpoint.json does not match its checksum"),
        (describe(lambda fields: fields.pop("layout")), "checkpoint.json does not match its checksum"),
    ],
)  # fmt: skip
def test_a_damaged_newest_checkpoint_is_told_in_one_line_and_the_older_one_is_taken(
    damage: Damage, line: str, two: Any, restart: Any, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    damage(root / "step_2")
    resumed = restart()
    assert str(resumed.version) == "1.1"
    assert resumed.ledger == Ledger(below=8)
    assert all(torch.equal(tensor, two[1][name]) for name, tensor in weights(resumed).items())
    (told,) = resumed.damage
    assert told.startswith(str(root / "step_2"))
    assert told.endswith(": step_2 is set aside, training goes on from step_1")
    documented("...: step_... is set aside, training goes on from step_...", told, GOES_ON)
    assert re.search(line, told)
    assert sorted(path.name for path in root.iterdir()) == ["incarnation", "step_1", "step_2.damaged"]
    resumed.train_step(make_batch(1))
    resumed.save()
    assert [saved.version.step for saved in resumed.saved(wait=True)] == [2]
    assert all(torch.equal(tensor, two[2][name]) for name, tensor in weights(restart()).items())


def test_a_checkpoint_under_another_ones_name_is_damage(two: Any, restart: Any, tmp_path: Path):
    root = tmp_path / "checkpoints"
    shutil.copytree(root / "step_1", root / "step_9")
    resumed = restart()
    assert resumed.version.step == 2
    assert "step_9/checkpoint.json is of step 1" in resumed.damage[0]


def test_with_no_whole_checkpoint_the_learner_ends_with_one_line_and_touches_nothing(
    two: Any, restart: Any, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    flip(shard(root / "step_1"))
    (root / "step_2" / "checkpoint.json").unlink()
    for _ in range(2):  # the next start finds the same, and never begins from step 0
        with pytest.raises(ConfigError, match=r"step_2/checkpoint.json is gone; .*step_1/.* does not match") as refused:
            restart()
        assert "no checkpoint is left to resume from; allowed: " in str(refused.value)
        documented("...: no checkpoint is left to resume from; allowed: ...", str(refused.value), 2)
        assert "\n" not in str(refused.value)
        assert sorted(path.name for path in root.iterdir()) == ["incarnation", "step_1", "step_2"]


def test_a_damaged_export_is_told_and_does_not_cost_a_step(config: Config, trainer_of: Any, tmp_path: Path) -> None:
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export_each": True})})
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    trainer.saved(wait=True)
    flip(tmp_path / "checkpoints" / "step_0" / "huggingface" / "model.safetensors")
    resumed = trainer_of(config, tmp_path)
    assert resumed.version.step == 0
    (told,) = resumed.damage
    assert told.endswith("model.safetensors does not match its checksum: it is part of an export, and training goes on")
    documented("...: it is part of an export, and training goes on", told, GOES_ON)


def test_the_checkpoint_of_another_run_is_refused_with_both_ids(
    config: Config, two: Any, trainer_of: Any, tmp_path: Path
) -> None:
    mine = json.loads((tmp_path / "run.json").read_text())["id"]
    other = trainer_of(config, tmp_path / "other")
    other.save()
    (saved,) = other.saved(wait=True)
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.copytree(saved.folder.parent, tmp_path / "checkpoints")
    with pytest.raises(
        AnotherRun, match=f"step_0 is of run {saved.run}, and its run folder is of run {mine}; allowed"
    ) as refused:
        trainer_of(config, tmp_path)
    documented("... is of run ..., and its run folder is of run ...; allowed...", str(refused.value), 2)


def former(folder: Path) -> None:
    """As it was written before there were checksums and ids."""
    fields = json.loads((folder / "checkpoint.json").read_text())
    kept = {name: fields[name] for name in ("version", "fixed", "layout", "ledger")}
    (folder / "checkpoint.json").write_text(json.dumps({"format": 3, **kept}))


def test_a_checkpoint_from_before_the_id_is_read_in_the_folder_that_is_adopted_and_in_no_other(
    two: Any, restart: Any, tmp_path: Path
) -> None:
    former(tmp_path / "checkpoints" / "step_2")
    with pytest.raises(AnotherRun, match="step_2 is of a run without an id"):
        restart()
    (tmp_path / "run.json").unlink()
    (tmp_path / "config.yaml").write_text("")
    resumed = restart()
    assert all(torch.equal(tensor, two[2][name]) for name, tensor in weights(resumed).items())
    assert resumed.ledger == Ledger(below=16)


@pytest.mark.parametrize("content", ["", "three", "\x00"])
def test_a_count_of_starts_that_is_none_is_one_line(content: str, two: Any, restart: Any, tmp_path: Path):
    (tmp_path / "checkpoints" / "incarnation").write_text(content)
    with pytest.raises(ConfigError) as refused:
        restart()
    documented("...incarnation: ... is no number; allowed: ...", str(refused.value), 2)


def test_two_ranks_sum_their_files_and_fall_back_together(two_ranks: Any, model_folder: Any, tmp_path: Path) -> None:
    config = make_config(model_folder("qwen2", True), ranks=2)
    run = tmp_path / "run"
    saved = two_ranks("save_two", config, run)
    root = run / "checkpoints"
    files = checkpoint.read(root / "step_2").files
    assert len([name for name in files if name.endswith(".distcp")]) == 2
    flip(root / "step_2" / "__1_0.distcp", 700)
    resumed = two_ranks("resume", config, run)
    assert resumed["version"] == "1.1"
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in resumed["weights"].items())
    assert (root / "step_2.damaged").is_dir()


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_reads_and_writes_files_as_long_as_for_a_checkpoint(
    two_ranks: Any, model_folder: Any, tmp_path: Path
) -> None:
    config = make_config(model_folder("qwen2", True), ranks=2)
    two_ranks("save_two", config, tmp_path / "run")
    assert two_ranks("behind_slow_files", config, tmp_path / "run") == {"version": "2.1", "model": True}
