"""The loss against TRL's own `GRPOTrainer._compute_loss`, values and gradients, in float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.losses_trl import COLUMNS, NORM_LENGTH, ROWS, TRL_LOSS, rectangular, streamrl_loss, trl_loss
from streamrl.config.algo import AlgoConfig

CASES = [(aggregation, loss_type) for aggregation, loss_types in TRL_LOSS.items() for loss_type in loss_types]
TOLERANCE = 1e-9


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
    theirs, reported = trl_loss(data, loss_type, config, data["old"])
    assert_equal_values_and_gradients(ours, theirs, data)
    assert metrics["loss/clip_low"] == pytest.approx(reported["clip_ratio/low_mean"][0])
    assert metrics["loss/clip_high"] == pytest.approx(reported["clip_ratio/high_mean"][0])


@pytest.mark.parametrize(("aggregation", "loss_type"), CASES)
def test_at_staleness_zero_interpolate_is_the_same_loss(aggregation, loss_type):
    keys = {"aggregation": aggregation, "norm_length": NORM_LENGTH}
    config = AlgoConfig(weight="none", proximal="interpolate", **keys)
    data = rectangular()
    ours, _ = streamrl_loss(data, config, staleness=0)
    theirs, _ = trl_loss(data, loss_type, config, data["old"])
    assert_equal_values_and_gradients(ours, theirs, data)


def test_the_default_weight_leaves_the_loss_alone_while_no_ratio_passes_the_cap():
    data = rectangular(spread=0.25)
    assert (data["logprobs"] - data["old"]).exp()[data["mask"]].max() < AlgoConfig().weight_cap
    ours, _ = streamrl_loss(data, AlgoConfig(), staleness=3)
    theirs, _ = trl_loss(data, "dapo", AlgoConfig(), data["old"])
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
    theirs, reported = trl_loss(data, "dapo", config, data["old"])
    assert_equal_values_and_gradients(ours, theirs, data)
    assert metrics["loss/entropy"] == pytest.approx(reported["entropy"][0])


def test_the_kl_term_is_trls():
    config = AlgoConfig(weight="none", kl=0.3)
    data = rectangular()
    ours, metrics = streamrl_loss(data, config, staleness=0)
    theirs, reported = trl_loss(data, "dapo", config, data["old"])
    assert_equal_values_and_gradients(ours, theirs, data)
    assert metrics["loss/kl"] == pytest.approx(reported["kl"][0])
    assert metrics["loss/kl"] > 0.01


@pytest.mark.parametrize(("aggregation", "loss_type"), CASES)
def test_gspo_is_trls_loss_at_the_level_of_sequences(aggregation, loss_type):
    keys = {"aggregation": aggregation, "norm_length": NORM_LENGTH, "eps_low": 0.05, "eps_high": 0.1, "dual_clip": 1.12}
    config = AlgoConfig(loss="gspo", **keys)
    data = rectangular(drift=1.0)
    ours, metrics = streamrl_loss(data, config, staleness=0)
    theirs, _ = trl_loss(data, loss_type, config, data["old"])
    assert min(metrics[f"loss/clip_{name}"] for name in ("low", "high", "dual")) > 0
    assert_equal_values_and_gradients(ours, theirs, data)


def test_cispo_is_trls_where_it_has_no_lower_edge():
    config = AlgoConfig(loss="cispo", eps_low=1.0)
    data = rectangular()
    ours, metrics = streamrl_loss(data, config, staleness=0)
    theirs, _ = trl_loss(data, "cispo", config, data["old"])
    assert metrics["loss/clip_high"] > 0
    assert_equal_values_and_gradients(ours, theirs, data)


def test_sapo_is_trls():
    # TRL rounds the temperatures to float32: these are exact in it.
    config = AlgoConfig(loss="sapo", aggregation="sequence_mean", sapo_positive=0.75, sapo_negative=1.5)
    data = rectangular()
    ours, _ = streamrl_loss(data, config, staleness=0)
    theirs, _ = trl_loss(data, "sapo", config, data["old"])
    assert_equal_values_and_gradients(ours, theirs, data)
