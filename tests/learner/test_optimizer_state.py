"""Whatever class of optimizer Megatron takes, its state is saved and loaded, also before its first update."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from gpu_optimizers import FusedAdam, use_fused_adam, use_two_memories
from learner_parts import make_batch, make_config, weights
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from streamrl.learner import optimizer as policy_optimizer


def train(trainer, steps: int) -> dict[str, torch.Tensor]:
    for step in range(trainer.version.step, trainer.version.step + steps):
        trainer.train_step(make_batch(step))
    return weights(trainer)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture
def resumes(model_folder, trainer_of, tmp_path):
    """`resumes(before, dtype, settings)`: save after `before` steps and take two more; a resumed learner takes the same
    two, and saving moved no weight. Returns the optimizer inside Megatron's."""

    def check(before: int, dtype: str, settings: dict[str, Any]) -> torch.optim.Optimizer:
        config = make_config(model_folder(), dtype=dtype, optimizer={"weight_decay": 0.1, **settings})
        undisturbed = train(trainer_of(config), before + 2)
        trainer = trainer_of(config, tmp_path / "run")
        train(trainer, before)
        trainer.save()
        assert equal(train(trainer, 2), undisturbed)
        resumed = trainer_of(config, tmp_path / "run")
        assert resumed.version.step == before
        assert equal(train(resumed, 2), undisturbed)
        (part,) = resumed._optimizer.megatron.chained_optimizers
        return part.optimizer

    return check


# -- Transformer Engine's Adam


@pytest.mark.parametrize("before", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_fused_adam_is_saved_before_its_first_update_and_after(dtype, distributed, before, monkeypatch, resumes):
    use_fused_adam(monkeypatch)
    assert isinstance(resumes(before, dtype, {"distributed": distributed}), FusedAdam)


@pytest.mark.parametrize("before", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_moments_in_bfloat16_and_master_weights_inside_the_fused_adam_are_saved(before, monkeypatch, resumes):
    use_fused_adam(monkeypatch)
    package = types.ModuleType("transformer_engine.pytorch.optimizers")
    package.FusedAdam = FusedAdam
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    config_of = policy_optimizer._config

    def precision_aware(*arguments):
        smaller = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
        return dataclasses.replace(config_of(*arguments), **smaller)

    monkeypatch.setattr(policy_optimizer, "_config", precision_aware)
    optimizer = resumes(before, "bfloat16", {"distributed": True})
    assert optimizer.master_weights
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


# -- a share of it on the host


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_offloaded_optimizer_trains_saves_and_resumes(share, before, fused, monkeypatch, resumes):
    if fused:
        use_fused_adam(monkeypatch)
    use_two_memories(monkeypatch)
    optimizer = resumes(before, "bfloat16", {"distributed": True, "offload": share})
    assert isinstance(optimizer, HybridDeviceOptimizer)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_offloaded_optimizer_moves_the_weights_as_the_ordinary_one_does(
    share, monkeypatch, model_folder, trainer_of
):
    def trained(**optimizer) -> dict[str, torch.Tensor]:
        optimizer = {"distributed": True, "weight_decay": 0.1, "clip_grad": 0.01, **optimizer}
        return train(trainer_of(make_config(model_folder(), dtype="bfloat16", optimizer=optimizer)), 3)

    ordinary = trained()
    use_two_memories(monkeypatch)
    assert equal(trained(offload=share), ordinary)


def test_as_many_values_are_on_the_host_as_were_asked_for(monkeypatch, model_folder, trainer_of):
    use_fused_adam(monkeypatch)
    use_two_memories(monkeypatch)
    optimizer = {"distributed": True, "offload": 0.5}
    trainer = trainer_of(make_config(model_folder(), dtype="bfloat16", optimizer=optimizer))
    hybrid = trainer._optimizer.megatron.chained_optimizers[0].optimizer
    on_host = sum(parameter.numel() for parameter in hybrid.cpu_copys_map_gpu_param)
    both = sum(parameter.numel() for group in hybrid.param_groups for parameter in group["params"])
    largest = max(parameter.numel() for group in hybrid.param_groups for parameter in group["params"])
    assert both / 2 <= on_host <= both / 2 + largest
    assert isinstance(hybrid.gpu_optimizer, FusedAdam)
    assert {type(each) for each in hybrid.cpu_optimizers} == {torch.optim.AdamW}
