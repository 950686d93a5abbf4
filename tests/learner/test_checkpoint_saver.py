"""Checkpoints are written while training goes on, completely or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from learner_parts import make_batch, make_config, weights
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from safetensors.torch import load_file

from benchmarks import ready_ranks
from streamrl import whole_files
from streamrl.learner import checkpoint
from streamrl.learner.checkpoint_saver import CheckpointError

FOLDER = Path(__file__).parent


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checkpoints are not written before the event is set, as on a slow disk."""
    write, go = FileSystemWriterAsync.write_preloaded_data, threading.Event()

    def write_when_told(*arguments, **keywords):
        assert go.wait(60)
        return write(*arguments, **keywords)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_when_told))
    yield go
    go.set()


@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    distributed, held, model_folder, trainer_of, tmp_path
):
    config = make_config(model_folder("qwen2", True), optimizer={"distributed": distributed})
    trainer = trainer_of(config, tmp_path)
    trainer.train_step(make_batch(0))
    trainer.save()
    expected = weights(trainer)
    rows = [trainer.train_step(make_batch(step)) for step in (1, 2)]
    assert trainer.saved() == []
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    held.set()
    (saved,) = trainer.saved(wait=True)
    assert (saved.version.step, saved.folder) == (1, tmp_path / "checkpoints" / "step_1")
    assert trainer.saved() == []

    resumed = trainer_of(config, tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())
    assert [resumed.train_step(make_batch(step))["grad_norm"] for step in (1, 2)] == [row["grad_norm"] for row in rows]


def test_the_next_save_waits_for_the_one_before(held, model_folder, trainer_of, tmp_path):
    trainer = trainer_of(make_config(model_folder()), tmp_path)
    trainer.save()
    trainer.train_step(make_batch(0))
    threading.Timer(0.5, held.set).start()
    trainer.save()
    assert held.is_set()
    assert [saved.version.step for saved in trainer.saved(wait=True)] == [0, 1]


def test_without_background_a_save_is_complete_when_it_returns(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"background": False})})
    trainer_of(config, tmp_path).save()
    assert checkpoint.latest(tmp_path / "checkpoints").version.step == 0


def test_a_write_that_fails_is_told_and_leaves_the_former_checkpoint(model_folder, trainer_of, tmp_path, monkeypatch):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    trainer.saved(wait=True)
    trainer.train_step(make_batch(0))

    def no_space(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", no_space)
        trainer.save()
        with pytest.raises(CheckpointError, match=r"step_1 was not written: .*No space left on device"):
            trainer.saved(wait=True)
    assert checkpoint.latest(tmp_path / "checkpoints").version.step == 0
    trainer.save()
    assert [saved.version.step for saved in trainer.saved(wait=True)] == [1]
    assert str(trainer_of(config, tmp_path).version) == "1.1"


def test_a_write_that_takes_too_long_is_told(held, model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"timeout": 1.0})})
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    with pytest.raises(CheckpointError, match=r"step_0 was not written in checkpoint.timeout=1 seconds"):
        trainer.saved(wait=True)
    held.set()
    trainer._saver._under_way.thread.join(60)


def test_the_newest_are_kept_and_every_third_besides(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_every": 3})})
    trainer = trainer_of(config, tmp_path)
    for step in range(8):
        trainer.train_step(make_batch(step))
        trainer.save()
    trainer.saved(wait=True)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"incarnation", "step_3", "step_6", "step_7", "step_8"}
    # The journal need not reach back to those that no run resumes from.
    assert trainer.oldest_checkpoint == 7


def test_an_expired_checkpoint_that_cannot_be_removed_costs_nothing_and_goes_at_the_next_start(
    model_folder, trainer_of, tmp_path, monkeypatch, caplog
):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)

    def busy(folder, **options):
        raise OSError(39, "Directory not empty", str(folder))

    with monkeypatch.context() as patch:
        for step in range(3):
            trainer.train_step(make_batch(step))
            trainer.saved(wait=True)
            if step == 2:
                patch.setattr(checkpoint.shutil, "rmtree", lambda folder, **options: options or busy(folder))
            trainer.save()
        assert [saved.version.step for saved in trainer.saved(wait=True)] == [3]
    assert f"{tmp_path / 'checkpoints' / '.step_1.old'} is not removed: [Errno 39]" in caplog.text
    assert str(trainer_of(config, tmp_path).version) == "3.1"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["incarnation", "step_2", "step_3"]


def test_the_oldest_is_that_of_the_saves_that_are_finished(model_folder, trainer_of, tmp_path, monkeypatch):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)
    sync, renamed, go = whole_files.sync, threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        if path == tmp_path / "checkpoints" and (path / "step_0").exists():
            renamed.set()
            assert go.wait(60)
        sync(path)

    monkeypatch.setattr(whole_files, "sync", slow)
    trainer.save()
    assert renamed.wait(60)
    assert trainer.oldest_checkpoint is None  # a crash may still undo the name
    go.set()
    trainer.saved(wait=True)
    assert trainer.oldest_checkpoint == 0
    assert trainer_of(config, tmp_path).oldest_checkpoint == 0  # what the disk says


def test_a_checkpoint_is_exported_as_a_hugging_face_folder_inside_it(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder("qwen3", True))
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export_each": True})})
    trainer = trainer_of(config, tmp_path)
    trainer.train_step(make_batch(0))
    trainer.save()
    (saved,) = trainer.saved(wait=True)
    expected = weights(trainer)
    exported = load_file(saved.folder / "huggingface" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert (saved.folder / "huggingface" / "config.json").is_file()


def test_what_a_kill_left_is_removed_and_what_it_was_replacing_comes_back(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    trainer.saved(wait=True)
    root = tmp_path / "checkpoints"
    (root / "step_0").rename(root / ".step_0.old")  # killed between the two renames of a replacement
    (root / ".step_0.saving").mkdir()
    (root / ".step_7.old").mkdir()  # killed while it removed one
    resumed = trainer_of(config, tmp_path)
    assert str(resumed.version) == "0.1"
    assert sorted(path.name for path in root.iterdir()) == ["incarnation", "step_0"]


@pytest.mark.parametrize(
    "stage",
    ["write", "rename", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("index", "prune", "remove"))],
)
def test_a_kill_in_the_middle_of_a_save_leaves_the_former_checkpoint(stage, model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    (tmp_path / "config.json").write_text(config.model_dump_json())
    program = (FOLDER / "killed_at_work.py", str(tmp_path / "config.json"), str(tmp_path), stage)
    learner = ready_ranks.start(ready_ranks.run_program, program, {}, tmp_path / "learner.log")
    try:
        wait_for(tmp_path / "reached", learner)
    finally:
        learner.kill()
        learner.join()
    expected = torch.load(tmp_path / "weights.pt")
    survived = 3 if stage in ("prune", "remove") else 2
    trainer = trainer_of(config, tmp_path)
    assert trainer.version.step == survived
    kept = [checkpoint.step_of(folder) for folder in checkpoint.complete(tmp_path / "checkpoints")]
    assert kept == [survived - 1, survived]
    assert all(torch.equal(tensor, expected[survived][name]) for name, tensor in weights(trainer).items())
    trainer.train_step(make_batch(survived))
    trainer.save()
    assert [saved.version.step for saved in trainer.saved(wait=True)] == [survived + 1]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def wait_for(path: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.is_alive(), "the learner ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)
