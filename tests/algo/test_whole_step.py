"""The rules that look at a whole step, against loops, and their independence of order and packing."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.losses_reference import slow_covariant, slow_outliers
from streamrl.algo.tokens import TokenBatch
from streamrl.algo.whole_step import StepTokens, needs_scores, needs_selection, second_moment_outliers, select
from streamrl.config.algo import AlgoConfig

LENGTHS = (40, 25, 60, 35, 40)
CLIP_COV = {"covariance": "clip_cov", "covariance_share": 0.05, "covariance_low": 0.1, "covariance_high": 0.6}
KL_COV = {"covariance": "kl_cov", "covariance_share": 0.1}
SECOND_MOMENT = {"proximal": "recompute", "mask": "second_moment", "second_moment": 0.1}


@pytest.fixture
def batch(token_batch) -> TokenBatch:
    """200 trained tokens, two of them without a behaviour log-prob."""
    batch = token_batch(5, lengths=LENGTHS, spread=0.6, mask=torch.ones(200, dtype=torch.bool))
    batch.behaviour[torch.tensor([3, 120])] = -math.inf
    return batch


def step_tokens(batch: TokenBatch, place: torch.Tensor | None = None) -> StepTokens:
    return StepTokens(
        scores=batch.logprobs.detach(),
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        staleness=batch.staleness,
        place=torch.arange(len(batch.mask)) if place is None else place,
    )


def log_rho(batch: TokenBatch) -> torch.Tensor:
    return (batch.logprobs.detach() - batch.behaviour)[batch.behaviour.isfinite()]


@pytest.mark.parametrize("limit", [0.01, 0.04, 0.2, 10.0])
def test_second_moment_takes_the_largest_until_the_mean_of_the_others_is_small_enough(batch, limit):
    values = log_rho(batch)
    taken = second_moment_outliers(values, limit)
    assert taken.tolist() == slow_outliers(values.tolist(), limit)
    assert values[~taken].square().mean() <= limit
    if limit < 10:
        assert 0 < taken.sum() < len(values)
        one_more = values.square() <= values[taken].square().min()
        assert values[one_more].square().mean() > limit


def test_second_moment_treats_equal_values_alike_and_bears_an_empty_step():
    values = torch.tensor([0.3, -0.3, 0.1, 0.3], dtype=torch.float64)
    assert second_moment_outliers(values, 0.05).tolist() == [True, True, False, True]
    assert second_moment_outliers(values[:0], 0.05).tolist() == []
    assert second_moment_outliers(values + 3e38, 0.04).all()


def test_a_step_whose_second_moment_is_small_enough_loses_no_token(batch):
    keys = SECOND_MOMENT | {"second_moment": 10.0}
    assert not select(step_tokens(batch), 1, AlgoConfig(**keys)).outliers.any()


@pytest.mark.parametrize("keys", [KL_COV, CLIP_COV], ids=["kl_cov", "clip_cov"])
@pytest.mark.parametrize("loss", ["clip", "cispo"])
@pytest.mark.parametrize("proximal", ["behaviour", "recompute", "interpolate"])
def test_the_covariance_rules_take_what_the_loop_takes(batch, keys, loss, proximal):
    config = AlgoConfig(loss=loss, proximal=proximal, **keys)
    tokens = step_tokens(batch)
    taken = select(tokens, 7, config).covariant
    assert taken.tolist() == slow_covariant(tokens.scores, batch, tokens.place, 7, config)
    assert taken.sum() == int(config.covariance_share * 198)
    assert not taken[torch.tensor([3, 120])].any()


def test_clip_cov_passes_over_tokens_that_the_clip_has_stopped_already(batch):
    tokens = step_tokens(batch)
    every = {"covariance_share": 1.0}
    free = select(tokens, 7, AlgoConfig(loss="reinforce", **(CLIP_COV | every))).covariant
    clipped = select(tokens, 7, AlgoConfig(loss="clip", **(CLIP_COV | every))).covariant
    at_start = select(tokens, 7, AlgoConfig(loss="clip", proximal="recompute", **(CLIP_COV | every))).covariant
    assert torch.equal(at_start, free)
    assert torch.equal(clipped & free, clipped)
    assert 0 < clipped.sum() < free.sum()


def test_the_draw_of_clip_cov_changes_with_the_step(batch):
    tokens = step_tokens(batch)
    draws = [select(tokens, step, AlgoConfig(**CLIP_COV)).covariant for step in (7, 7, 8)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("keys", [KL_COV, CLIP_COV, SECOND_MOMENT], ids=["kl_cov", "clip_cov", "second_moment"])
def test_the_order_of_the_tokens_changes_nothing_even_between_equal_ones(batch, keys):
    # Twenty tokens are the same in everything but their place.
    for tensor in (batch.logprobs.data, batch.behaviour, batch.advantages, batch.staleness):
        tensor[10:30] = tensor[10]
    batch.advantages[10:30] = -2.0
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    turned = step_tokens(batch.select(order), order)
    config = AlgoConfig(**keys)
    plain, shuffled = select(step_tokens(batch), 2, config), select(turned, 2, config)
    for one, other in ((plain.outliers, shuffled.outliers), (plain.covariant, shuffled.covariant)):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one[order], other)


def test_both_kinds_of_rule_can_be_on_and_a_rule_that_is_off_has_no_selection(batch):
    both = select(step_tokens(batch), 1, AlgoConfig(**SECOND_MOMENT, **KL_COV))
    assert both.outliers.any()
    assert both.covariant.any()
    assert select(step_tokens(batch), 1, AlgoConfig(**KL_COV)).outliers is None
    assert select(step_tokens(batch), 1, AlgoConfig(**SECOND_MOMENT)).covariant is None


@pytest.mark.parametrize("keys", [KL_COV, CLIP_COV, SECOND_MOMENT], ids=["kl_cov", "clip_cov", "second_moment"])
def test_a_step_without_a_measured_token_selects_nothing(token_batch, keys):
    for lengths in ((), (3,)):
        batch = token_batch(0, lengths=lengths)
        batch.behaviour[:] = math.nan
        selection = select(step_tokens(batch), 1, AlgoConfig(**keys))
        picked = selection.covariant if selection.outliers is None else selection.outliers
        assert picked.shape == batch.mask.shape
        assert not picked.any()


def test_only_the_settings_that_need_a_first_forward_pass_ask_for_it():
    assert not needs_scores(AlgoConfig())
    assert needs_scores(AlgoConfig(proximal="recompute"))
    assert not needs_selection(AlgoConfig(proximal="recompute"))
    for keys in (KL_COV, CLIP_COV, SECOND_MOMENT):
        assert needs_scores(AlgoConfig(**keys))
        assert needs_selection(AlgoConfig(**keys))
