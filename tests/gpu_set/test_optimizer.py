"""Transformer Engine's Adam, made by Megatron: its state in a checkpoint before and after its first update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_learner import EngineLearner
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from transformer_engine.pytorch.optimizers import FusedAdam

from benchmarks.random_models import ENGINE_FAMILIES
from streamrl.learner import checkpoint
from streamrl.learner.checkpoint_saver import Saver
from streamrl.learner.huggingface import load_weights
from streamrl.learner.optimizer import PolicyOptimizer, Update
from streamrl.types import PolicyVersion

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The moments that a checkpoint is told of, by key."""
    found = [value for value in nested_values(state["optimizer"]) if isinstance(value, ShardedTensor)]
    return {each.key: each.data for each in found if any(moment in each.key.split(".") for moment in MOMENTS)}


def test_megatron_makes_transformer_engines_adam_for_every_family(model_folder, learner):
    for family in ENGINE_FAMILIES:
        optimizer, *_ = learner(model_folder(family)).optimized()
        assert all(type(part.optimizer) is FusedAdam for part in optimizer.megatron.chained_optimizers)
        assert optimizer.torch_adams() == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_its_state_can_be_saved_before_the_first_update(family, model_folder, learner):
    made = learner(model_folder(family))
    load_weights([made.model], model_folder(family))
    _, _, state = made.optimized()
    for loading in (False, True):
        found = moments(state.sharded(loading))
        assert found
        if not loading:
            assert all(not tensor.any() for tensor in found.values())


def updated(made: EngineLearner, optimizer: PolicyOptimizer, wrapped: Any, gradient: float) -> Update:
    """One update whose gradient is this number everywhere."""
    wrapped.zero_grad_buffer()
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(gradient)
    wrapped.finish_grad_sync()
    optimizer.begin_step()
    return optimizer.update()


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_its_state_after_an_update_is_saved_and_the_update_is_adams(family, rank, model_folder, learner):
    made = learner(model_folder(family), lora=adapters(rank))
    load_weights([made.model], model_folder(family))
    optimizer, (wrapped,), state = made.optimized()
    trained = {name: each for name, each in made.model.named_parameters() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in trained.items()}
    update = updated(made, optimizer, wrapped, 0.01)
    assert update.successful
    assert update.grad_norm == pytest.approx(0.01 * sum(each.numel() for each in trained.values()) ** 0.5, rel=1e-3)
    found = moments(state.sharded(False))
    assert found
    assert all(tensor.any() for tensor in found.values())
    # A first step of Adam is the learning rate, whatever the gradient.
    moved = torch.cat([(before[name] - each.detach()).float().flatten() for name, each in trained.items()])
    assert float(moved.mean()) == pytest.approx(update.lr, rel=0.05)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_resumed_run_goes_on_bit_by_bit(family, rank, model_folder, learner, tmp_path):
    folder = model_folder(family)
    made = learner(folder, lora=adapters(rank))
    load_weights([made.model], folder)
    optimizer, (wrapped,), state = made.optimized()
    updated(made, optimizer, wrapped, 0.01)
    saver = Saver(tmp_path, made.ranks, made.config.checkpoint, "run")
    saver.start(PolicyVersion(1), state, None)
    saver.wait()
    updated(made, optimizer, wrapped, -0.02)
    expected = {name: each.detach().clone() for name, each in made.model.named_parameters()}

    made = learner(folder, lora=adapters(rank))
    load_weights([made.model], folder)
    optimizer, (wrapped,), state = made.optimized()
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    checkpoint.load(saved, state)
    updated(made, optimizer, wrapped, -0.02)
    assert not [name for name, each in made.model.named_parameters() if not torch.equal(each, expected[name])]


def adapters(rank: int) -> dict[str, Any]:
    """`learner.lora` with what every family has."""
    return {"rank": rank, "targets": ["linear_qkv", "linear_proj"]} if rank else {}
