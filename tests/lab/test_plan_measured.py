"""What a plan says a rank of the learner holds is what the learner of a tiny model really holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch import tiny_model
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.plan.learner_memory import RankMemory, fullest_rank
from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.placement import place
from streamrl.lab.plan.saves import saves
from streamrl.learner.critic import Critic
from streamrl.learner.shape import read_shape
from streamrl.learner.trainer import Trainer
from tests.learner.checkpoint_bytes import bytes_of_files

LAPTOP = Machines(gpus_per_host=0)


def held(trainer: Trainer | Critic) -> dict[str, int]:
    """Bytes of the weights, of the gradients' buffers, and of Adam's state with float32 copies of bf16 weights."""
    trainer._optimizer.fill_state()
    weights = [parameter for chunk in trainer._chunks for parameter in chunk.parameters()]
    wrapped = trainer._passes._chunks if isinstance(trainer, Critic) else trainer._wrapped
    buffers = [each for chunk in wrapped for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizer = 0
    for adam in trainer._optimizer.torch_adams():
        for parameter in (each for group in adam.param_groups for each in group["params"]):
            state = adam.state[parameter]
            optimizer += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
            if weights[0].dtype == torch.bfloat16:
                optimizer += parameter.nbytes
    return {
        "weights": sum(each.nbytes for each in weights),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": optimizer,
    }


def written(folder: Path, family: str, *overrides: str) -> tuple[int, int]:
    """Bytes of tensors in the file of the only rank, and what the plan says."""
    tiny_model.make(folder / "tiny", family=family)
    config: Config = config_file.load(None, [f"model.path={folder / 'tiny'}", *overrides])
    trainer = Trainer(config, folder / "run")
    try:
        trainer.restore_or_start()
        trainer.save()
        (saved,) = trainer.saved(wait=True)
        (planned,) = saves(config, read_shape(config.model.path), LAPTOP, place(1, [], LAPTOP))
        return bytes_of_files(saved.folder).total(), planned.written
    finally:
        trainer.close()


def measured(folder: Path, family: str, *overrides: str) -> tuple[dict[str, int], RankMemory]:
    """What the learner holds, and what the plan says."""
    tiny_model.make(folder / "tiny", family=family)
    config: Config = config_file.load(None, [f"model.path={folder / 'tiny'}", *overrides])
    trainer = Trainer(config, folder / "run")
    try:
        trainer.restore_or_start()
        return held(trainer), fullest_rank(config, read_shape(config.model.path), LAPTOP)
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_a_rank_holds_the_bytes_that_the_plan_says(tmp_path, family, dtype):
    real, plan = measured(tmp_path, family, f"model.dtype={dtype}")
    assert real == {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_held_besides_frozen_weights(tmp_path, dtype):
    real, plan = measured(tmp_path, "qwen2", f"model.dtype={dtype}", "learner.lora.rank=4")
    assert real == {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer}


@pytest.mark.slow
def test_the_distributed_optimizer_pads_what_the_plan_counts_by_a_few_values_a_tensor(tmp_path):
    real, plan = measured(tmp_path, "qwen2", "model.dtype=bfloat16", "learner.optimizer.distributed=true")
    tensors = 40  # more than there are; each begins at a multiple of 64 values
    assert plan.gradients <= real["gradients"] <= plan.gradients + 4 * 64 * tensors
    assert plan.optimizer <= real["optimizer"] <= plan.optimizer + 12 * 64 * tensors


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_critic_is_held_besides(tmp_path, family):
    tiny_model.make(tmp_path / "tiny", family=family)
    overrides = ("model.dtype=bfloat16", "algo.advantage.estimator=gae", "learner.lora.rank=4")
    targets = "learner.lora.targets=[linear_qkv]"
    config: Config = config_file.load(None, [f"model.path={tmp_path / 'tiny'}", *overrides, targets])
    trainer = Trainer(config, tmp_path / "run")
    try:
        real = held(trainer._critic)
        assert sum(real.values()) == fullest_rank(config, read_shape(config.model.path), LAPTOP).critic
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.advantage.estimator=gae", "learner.lora.rank=4"],
        ["model.dtype=float32"],
        ["learner.optimizer.distributed=true"],
        ["learner.lora.rank=4"],
        [],
    ],
    ids=["adapters and a critic", "float32", "distributed", "adapters", "bfloat16"],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_checkpoint_has_the_bytes_that_the_plan_says(tmp_path, family, overrides):
    real, planned = written(tmp_path, family, "model.dtype=bfloat16", "learner.lora.targets=[linear_qkv]", *overrides)
    assert real == planned
