"""The loss against TRL's own `GRPOTrainer._compute_loss`, values and gradients, in float64.

The method is called unbound on a stub that holds the settings it reads; its model call is replaced by the
log-probs and entropies under test, so that everything after the forward pass is TRL's code.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from streamrl.algo.diagnostics import finish
from streamrl.algo.losses import Denominators, TokenBatch, policy_loss
from streamrl.config_learner import AlgoConfig

ROWS, COLUMNS, NORM_LENGTH = 6, 9, 12
TRL_LOSS = {"token_mean": ("dapo", "bnpo"), "sequence_mean": ("grpo",), "sequence_sum_norm": ("dr_grpo",)}
CASES = [(aggregation, loss_type) for aggregation, loss_types in TRL_LOSS.items() for loss_type in loss_types]
TOLERANCE = 1e-9


def rectangular(spread: float = 0.6) -> dict[str, torch.Tensor]:
    """[ROWS, COLUMNS] log-probs, entropies and right-padded mask; [ROWS] advantages of both signs."""
    random = torch.Generator().manual_seed(4)
    old = -torch.rand(ROWS, COLUMNS, generator=random, dtype=torch.float64) * 3 - 0.1
    noise = torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 7, 1, 8, 6])
    return {
        "logprobs": (old + spread * noise).requires_grad_(),
        "entropy": torch.rand(ROWS, COLUMNS, generator=random, dtype=torch.float64).requires_grad_(),
        "old": old,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, -0.3, 0.9], dtype=torch.float64),
        "mask": torch.arange(COLUMNS) < lengths[:, None],
    }


def trl_loss(
    data: dict[str, torch.Tensor], loss_type: str, config: AlgoConfig, old: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (data["logprobs"], data["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=config.eps_low,
        epsilon_high=config.eps_high,
        args=SimpleNamespace(delta=config.dual_clip, steps_per_generation=1),
        use_vllm=weight is not None,
        vllm_importance_sampling_correction=weight is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=NORM_LENGTH,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _entropy_bonus_enabled=config.entropy != 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.int64),
        "completion_mask": data["mask"].double(),
        "advantages": data["advantages"],
        "old_per_token_logps": old,
        "num_items_in_batch": data["mask"].sum(),
        "importance_sampling_ratio": weight,
    }
    return GRPOTrainer._compute_loss(stub, None, inputs), stub._metrics["train"]


def streamrl_loss(
    data: dict[str, torch.Tensor], config: AlgoConfig, staleness: int
) -> tuple[torch.Tensor, dict[str, float]]:
    rows = torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS)
    batch = TokenBatch(
        logprobs=data["logprobs"].flatten(),
        entropy=data["entropy"].flatten(),
        behaviour=data["old"].flatten(),
        advantages=data["advantages"][rows].flatten(),
        mask=data["mask"].flatten(),
        staleness=torch.full((ROWS * COLUMNS,), staleness),
        sample=rows.flatten(),
        samples=ROWS,
    )
    loss, sums = policy_loss(batch, config, Denominators.of(data["mask"]))
    return loss, finish(sums)


def assert_equal_values_and_gradients(ours: torch.Tensor, theirs: torch.Tensor, data: dict[str, torch.Tensor]) -> None:
    leaves = (data["logprobs"], data["entropy"])
    assert abs(ours.item() - theirs.item()) <= TOLERANCE
    for mine, reference in zip(
        torch.autograd.grad(ours, leaves, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(theirs, leaves, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        assert (mine - reference).abs().max().item() <= TOLERANCE


def assert_every_clip_branch_is_taken(data: dict[str, torch.Tensor], config: AlgoConfig) -> None:
    ratio = (data["logprobs"] - data["old"]).exp()[data["mask"]]
    positive = (data["advantages"] > 0)[:, None].expand(ROWS, COLUMNS)[data["mask"]]
    above, below = ratio > 1 + config.eps_high, ratio < 1 - config.eps_low
    branches = {
        "A > 0 above": above & positive,
        "A > 0 below": below & positive,
        "A < 0 above": above & ~positive,
        "A < 0 below": below & ~positive,
        "A > 0 inside": ~above & ~below & positive,
        "A < 0 inside": ~above & ~below & ~positive,
    }
    if config.dual_clip is not None:
        branches["A < 0 above the dual clip"] = (ratio > config.dual_clip) & ~positive
        branches["A > 0 above the dual clip"] = (ratio > config.dual_clip) & positive
    assert [name for name, taken in branches.items() if not taken.any()] == []


@pytest.mark.parametrize(("aggregation", "loss_type"), CASES)
@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_without_weight_and_staleness_the_loss_is_the_clipped_ppo_of_trl(aggregation, loss_type, dual_clip):
    config = AlgoConfig(weight="none", aggregation=aggregation, norm_length=NORM_LENGTH, dual_clip=dual_clip)
    data = rectangular()
    assert_every_clip_branch_is_taken(data, config)
    ours, metrics = streamrl_loss(data, config, staleness=0)
    theirs, reported = trl_loss(data, loss_type, config, data["old"], weight=None)
    assert_equal_values_and_gradients(ours, theirs, data)
    assert metrics["loss/clip_low"] == pytest.approx(reported["clip_ratio/low_mean"][0])
    assert metrics["loss/clip_high"] == pytest.approx(reported["clip_ratio/high_mean"][0])


@pytest.mark.parametrize(("aggregation", "loss_type"), CASES)
def test_at_staleness_zero_interpolate_is_the_same_loss(aggregation, loss_type):
    keys = {"aggregation": aggregation, "norm_length": NORM_LENGTH}
    config = AlgoConfig(weight="none", proximal="interpolate", **keys)
    data = rectangular()
    ours, _ = streamrl_loss(data, config, staleness=0)
    theirs, _ = trl_loss(data, loss_type, config, data["old"], weight=None)
    assert_equal_values_and_gradients(ours, theirs, data)


def test_the_default_weight_leaves_the_loss_alone_while_no_ratio_passes_the_cap():
    data = rectangular(spread=0.25)
    assert (data["logprobs"] - data["old"]).exp()[data["mask"]].max() < AlgoConfig().weight_cap
    ours, _ = streamrl_loss(data, AlgoConfig(), staleness=3)
    theirs, _ = trl_loss(data, "dapo", AlgoConfig(), data["old"], weight=None)
    assert_equal_values_and_gradients(ours, theirs, data)


@pytest.mark.parametrize(("aggregation", "loss_type"), CASES)
def test_interpolate_with_a_truncated_weight_is_trls_decoupled_loss(aggregation, loss_type):
    """TRL multiplies by an importance ratio old / sampling: truncated, and with pi_old in between, it is ours."""
    keys = {"aggregation": aggregation, "norm_length": NORM_LENGTH, "weight_cap": 1.2}
    config = AlgoConfig(weight="token", proximal="interpolate", **keys)
    data = rectangular(spread=1.2)
    between = data["old"] + 0.75 * (data["logprobs"].detach() - data["old"])  # alpha = 3 / 4 at s = 3
    truncated = (between - data["old"]).exp().clamp(max=config.weight_cap)
    assert (truncated[data["mask"]] == config.weight_cap).any()
    ours, metrics = streamrl_loss(data, config, staleness=3)
    theirs, _ = trl_loss(data, loss_type, config, between, truncated)
    assert metrics["loss/clip_low"] > 0
    assert metrics["loss/clip_high"] > 0
    assert_equal_values_and_gradients(ours, theirs, data)


def test_the_entropy_bonus_is_trls():
    config = AlgoConfig(weight="none", entropy=0.03)
    data = rectangular()
    ours, metrics = streamrl_loss(data, config, staleness=0)
    theirs, reported = trl_loss(data, "dapo", config, data["old"], weight=None)
    assert_equal_values_and_gradients(ours, theirs, data)
    assert metrics["loss/entropy"] == pytest.approx(reported["entropy"][0])
