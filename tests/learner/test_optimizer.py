"""An update moves the weights, or nothing at all."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from learner_parts import make_batch, make_config, weights
from msgspec.structs import replace

from streamrl.config.file import ConfigError
from streamrl.config.learner import OptimizerSettings
from streamrl.learner import optimizer
from streamrl.learner.safety import BadStepsError


def spoil(trainer, value: float) -> None:
    """The next gradients have this value in one place."""
    optimizer = trainer._optimizer.megatron
    original = optimizer.prepare_grads

    def prepare():
        next(trainer._chunks[0].parameters()).main_grad.view(-1)[0] = value
        optimizer.prepare_grads = original
        return original()

    optimizer.prepare_grads = prepare


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_refused_update_changes_neither_weights_nor_moments(value, distributed, model_folder, trainer_of):
    settings = {"spike_factor": 100.0, "spike_window": 4, "distributed": distributed}
    trainer = trainer_of(make_config(model_folder(), optimizer=settings))
    for step in range(3):
        trainer.train_step(make_batch(step))
    before, moments = weights(trainer), moments_of(trainer)
    spoil(trainer, value)
    row = trainer.train_step(make_batch(3))
    assert (row["steps/updates"], row["steps/skipped"], row["steps/spikes"]) == (3, 1, value == 1e6)
    assert not row["grad_norm"] < 1e5
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moments_of(trainer), moments, strict=True))
    assert trainer.train_step(make_batch(4))["steps/updates"] == 4


def emptied(batch):
    """The batch with placeholders for all samples."""
    return replace(batch, groups=tuple(group.emptied for group in batch.groups))


@pytest.mark.parametrize("distributed", [False, True])
def test_without_a_trained_token_weights_and_moments_stay_bit_for_bit(distributed, model_folder, trainer_of):
    settings = {"weight_decay": 0.1, "distributed": distributed}
    trainer = trainer_of(make_config(model_folder(), optimizer=settings, params_metrics=True))
    trainer.train_step(make_batch(0))
    before, moments = weights(trainer), moments_of(trainer)
    row = trainer.train_step(emptied(make_batch(1)))
    assert (row["steps/updates"], row["steps/skipped"], row["grad_norm"]) == (1, 1, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moments_of(trainer), moments, strict=True))
    assert trainer.train_step(make_batch(2))["steps/updates"] == 2


def test_a_mini_batch_without_a_trained_token_is_left_out_and_the_next_one_tells_how_old_the_data_is(
    model_folder, trainer_of
):
    trainer = trainer_of(make_config(model_folder(), mini_batches=3))
    trainer.train_step(make_batch(0))
    batch = make_batch(1)
    row = trainer.train_step(replace(batch, groups=(batch.groups[0].emptied, *batch.groups[1:])))
    assert (row["steps/updates"], row["steps/skipped"]) == (3 + 2, 1)
    assert row["offpolicy/clipped"] > 0


def test_a_loss_that_is_not_finite_is_no_update(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    trainer.train_step(make_batch(0))
    before = weights(trainer)
    assert trainer._optimizer.update(loss=math.nan).verdict == "not finite"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_the_schedule_moves_once_a_step_whatever_becomes_of_the_updates(model_folder, trainer_of):
    config = make_config(model_folder(), optimizer={"lr": 1.0, "warmup_steps": 4}, mini_batches=3, passes=2)
    trainer = trainer_of(config)
    rates = []
    for step in range(4):
        if step == 1:
            spoil(trainer, math.nan)
        row = trainer.train_step(make_batch(step))
        rates.append(row["lr"])
    assert rates == [0.25, 0.5, 0.75, 1.0]
    assert (row["steps/updates"], row["steps/skipped"]) == (4 * 6 - 1, 1)


@pytest.mark.parametrize(
    ("decay", "warmup", "expected"),
    [
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1.0, 2 / 3, 1 / 3]),
        ("linear", 9, [1 / 9, 2 / 9, 3 / 9, 4 / 9]),
        ("cosine", 0, [(1 + math.cos(math.pi * x)) / 2 for x in (0, 0.25, 0.5, 0.75)]),
        ("constant", 0, [1.0] * 4),
    ],
)
def test_a_decay_begins_with_the_full_rate_and_reaches_the_least_behind_the_last_step(decay, warmup, expected):
    group: dict[str, float] = {}
    scheduler = optimizer._schedule(
        SimpleNamespace(param_groups=[group]), OptimizerSettings(lr=1.0, decay=decay, warmup_steps=warmup), run_steps=4
    )
    rates = []
    for _ in range(4):
        scheduler.step(1)
        rates.append(group["lr"])
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_last_step_of_a_linear_decay_trains_and_a_resume_keeps_the_schedule(
    steps, model_folder, trainer_of, tmp_path
):
    config = make_config(model_folder(), optimizer={"lr": 1e-3, "decay": "linear"})
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    trainer, rates = trainer_of(config, tmp_path), []
    for step in range(steps):
        if step == 2:
            trainer.save()
            trainer.saved(wait=True)
            trainer = trainer_of(config, tmp_path)
        before = weights(trainer)
        rates.append(trainer.train_step(make_batch(step))["lr"])
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert rates == pytest.approx([1e-3 * left / steps for left in range(steps, 0, -1)])


def test_steps_in_a_row_without_an_update_end_the_run(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), bad_steps=2))
    spoil(trainer, math.nan)
    trainer.train_step(make_batch(0))
    spoil(trainer, math.inf)
    with pytest.raises(BadStepsError, match="2 steps in a row made no update"):
        trainer.train_step(make_batch(1))


TENTH = {"lr": 0.5, "weight_decay": 0.2}  # what an update takes off

# The end of a name of Megatron's, and whether weight decay applies to it.
DECAYS = {
    "qwen2": {
        "word_embeddings.weight": True, "output_layer.weight": True, "linear_qkv.weight": True,
        "linear_qkv.bias": False, "linear_proj.weight": True, "linear_fc1.weight": True, "linear_fc2.weight": True,
        "input_layernorm.weight": False, "pre_mlp_layernorm.weight": False, "final_layernorm.weight": False,
    },
    "qwen3_moe": {"router.weight": True, "q_layernorm.weight": False, "k_layernorm.weight": False},
    "gpt_oss": {"core_attention.softmax_offset": False, "router.bias": False, "linear_fc1.bias": False},
    "nemotron_h": {".A_log": False, ".D": False, ".dt_bias": False},
    "qwen3_next": {
        "self_attention.A_log": False, "self_attention.dt_bias": False, "self_attention.conv": True,
        "in_proj.weight": True, "out_norm.weight": False, "shared_experts.gate_weight": True,
    },
}  # fmt: skip


def decayed(trainer) -> dict[str, bool]:
    """By Megatron's names: did an update by gradients of 0 take a tenth of the parameter? Those of 0 are left out."""
    before = {name: parameter.detach().clone() for name, parameter in trainer._chunks[0].named_parameters()}
    for parameter in trainer._chunks[0].parameters():
        if parameter.requires_grad:
            parameter.main_grad.zero_()
    trainer._optimizer.begin_step()
    assert trainer._optimizer.update().successful
    after = dict(trainer._chunks[0].named_parameters())
    kept = {name for name, weight in before.items() if torch.equal(after[name], weight)}
    smaller = {name for name, weight in before.items() if torch.allclose(after[name], 0.9 * weight, rtol=1e-6, atol=0)}
    assert kept | smaller == set(before)
    return {name: name in smaller for name in before if name not in kept & smaller}


@pytest.mark.parametrize("family", DECAYS)
def test_weight_decay_leaves_biases_norms_and_what_else_has_one_dimension(family, model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(family), optimizer=TENTH))
    found = decayed(trainer)
    for ending, decays in DECAYS[family].items():
        assert {found[name] for name in found if name.endswith(ending)} == {decays}, ending


def test_norms_of_queries_and_keys_decay_where_megatron_is_told_so(model_folder, trainer_of):
    settings = {"optimizer": TENTH, "megatron": {"apply_wd_to_qk_layernorm": True}}
    found = decayed(trainer_of(make_config(model_folder("qwen3_moe"), **settings)))
    norms = {name.split(".")[-2]: decays for name, decays in found.items() if "layernorm" in name}
    assert {name for name, decays in norms.items() if decays} == {"q_layernorm", "k_layernorm"}


def test_adapters_decay(model_folder, trainer_of):
    settings = {"optimizer": TENTH, "lora": {"rank": 2, "alpha": 2}}
    found = decayed(trainer_of(make_config(model_folder(), **settings)))
    assert {name.split(".")[-1] for name in found if found[name]} == {"lora_a"}  # lora_b begins as 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can offload")
def test_offloading_the_optimizer_is_refused_where_there_is_no_gpu(model_folder, trainer_of):
    with pytest.raises(ConfigError, match=r"learner.optimizer.offload: 0.5 .* no CUDA .* allowed: 0"):
        trainer_of(make_config(model_folder(), dtype="bfloat16", optimizer={"offload": 0.5}))


def test_offloading_needs_transformer_engine_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(optimizer, "te_problem", lambda: "is not installed")
    assert optimizer.offload_problem() == "Transformer Engine is not installed"
    monkeypatch.setattr(optimizer, "te_problem", lambda: None)
    assert optimizer.offload_problem() is None


def moments_of(trainer) -> list[torch.Tensor]:
    (adam,) = trainer._optimizer.torch_adams()
    return [value.clone() for state in adam.state.values() for value in state.values()]
