"""A resumed learner takes the steps that the uninterrupted one takes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from learner_parts import make_batch, make_config, weights

from streamrl.learner import checkpoint
from streamrl.learner.checkpoint import CheckpointDamaged, CheckpointMismatchError
from streamrl.types import Ledger, PolicyVersion

TIMED = ("time/", "learner/")  # seconds, and what is made of them


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_five_steps_after_a_resume_equal_the_uninterrupted_run(dtype, distributed, model_folder, trainer_of, tmp_path):
    optimizer = {"distributed": distributed, "decay": "linear", "warmup_steps": 2, "weight_decay": 0.1}
    config = make_config(model_folder("qwen2", True), dtype=dtype, optimizer=optimizer)
    trainer = trainer_of(config, tmp_path)
    for step in range(2):
        trainer.train_step(make_batch(step))
    torch.rand(5)  # the generator is no longer where the seed put it
    trainer.save()
    drawn = torch.rand(3)
    uninterrupted = [(trainer.train_step(make_batch(step)), weights(trainer)) for step in range(2, 7)]

    resumed = trainer_of(config, tmp_path)
    assert str(resumed.version) == "2.1"
    assert torch.equal(torch.rand(3), drawn)
    for step, (row, expected) in zip(range(2, 7), uninterrupted, strict=True):
        ours = resumed.train_step(make_batch(step))
        assert {k: v for k, v in ours.items() if not k.startswith(TIMED)} == {
            k: v for k, v in row.items() if not k.startswith(TIMED)
        }
        got = weights(resumed)
        assert all(torch.equal(got[name], expected[name]) for name in expected), f"step {step}"


def test_a_checkpoint_before_the_first_step_resumes(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)
    trainer.save()
    for step in range(2):
        trainer.train_step(make_batch(step))
    expected = weights(trainer)
    resumed = trainer_of(config, tmp_path)
    assert str(resumed.version) == "0.1"
    for step in range(2):
        resumed.train_step(make_batch(step))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_every_start_has_an_incarnation_of_its_own(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    assert str(trainer_of(config, tmp_path).version) == "0.0"
    trainer = trainer_of(config, tmp_path)
    assert str(trainer.version) == "0.1"
    trainer.train_step(make_batch())
    trainer.save()
    # Two starts from one checkpoint have different names for what follows.
    assert [str(trainer_of(config, tmp_path).version) for _ in range(2)] == ["1.2", "1.3"]


def test_nothing_half_written_counts(model_folder, trainer_of, tmp_path):
    trainer = trainer_of(make_config(model_folder()), tmp_path)
    for step in range(3):
        trainer.train_step(make_batch(step))
        trainer.save()
    trainer.saved(wait=True)
    (tmp_path / "checkpoints" / ".step_9.saving").mkdir()
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert (found.folder.name, str(found.version)) == ("step_3", "3.0")


def test_a_checkpoint_holds_the_ledger_of_the_groups_that_are_in_its_weights(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder())
    trainer = trainer_of(config, tmp_path)
    assert (trainer.ledger, trainer.oldest_checkpoint) == (None, None)
    ledger = Ledger(below=64, above=(66,), pending={65: ("copy", 65), 67: ("sums", 0)}, cursors={"copy": 67, "sums": 1})
    trainer.save(ledger)
    trainer.train_step(make_batch())
    resumed = trainer_of(config, tmp_path)
    assert (resumed.ledger, resumed.oldest_checkpoint) == (ledger, 0)
    resumed.save()  # as a learner does that trains from a record
    assert trainer_of(config, tmp_path).ledger is None


def test_a_copy_under_a_name_of_its_own_is_read_and_one_under_another_steps_name_is_not(tmp_path):
    told = checkpoint.describe(version="4.0", fixed={}, layout={}, ledger=None, run=None, files={})
    for name in ("step_4", "best", "step_5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_bytes(told)
    assert {checkpoint.read(tmp_path / name).version for name in ("step_4", "best")} == {PolicyVersion(4)}
    with pytest.raises(CheckpointDamaged, match="is of step 4: the folder has another one's name"):
        checkpoint.read(tmp_path / "step_5")


def test_saving_a_step_again_replaces_it(model_folder, trainer_of, tmp_path):
    trainer = trainer_of(make_config(model_folder()), tmp_path)
    trainer.save()
    trainer.save()
    assert len(trainer.saved(wait=True)) == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["incarnation", "step_0"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "bfloat16"}, "was written with dtype=float32, this run has dtype=bfloat16"),
        ({"optimizer": {"distributed": True}}, "was written with distributed_optimizer=False"),
        ({"family": "llama"}, "was written with model architecture=Qwen2ForCausalLM, this run has .*LlamaForCausalLM"),
        ({"tied": True}, "was written with model tied=False, this run has model tied=True"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_name(change, text, model_folder, trainer_of, tmp_path):
    trainer_of(make_config(model_folder()), tmp_path).save()
    model = model_folder(change.pop("family", "qwen2"), change.pop("tied", False))
    with pytest.raises(CheckpointMismatchError, match=text):
        trainer_of(make_config(model, **change), tmp_path)


def test_what_a_spike_is_judged_by_survives_a_resume(model_folder, trainer_of, tmp_path):
    config = make_config(model_folder(), optimizer={"spike_factor": 1.001, "spike_window": 4})
    trainer = trainer_of(config, tmp_path)
    norms = [trainer.train_step(make_batch(step))["grad_norm"] for step in range(3)]
    trainer.save()
    resumed = trainer_of(config, tmp_path)
    assert resumed._optimizer._guard.state_dict()["norms"] == norms


def test_the_configured_learning_rate_wins_over_the_checkpoints(model_folder, trainer_of, tmp_path):
    trainer_of(make_config(model_folder()), tmp_path).save()
    resumed = trainer_of(make_config(model_folder(), optimizer={"lr": 0.5}), tmp_path)
    assert resumed.train_step(make_batch())["lr"] == 0.5
