"""Importance weights: each choice against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.algo.importance import Weights, importance_weights, mask_edges, weight_cap
from streamrl.algo.proximals import proximal_of
from streamrl.algo.ratios import bounded_exp, geometric_mean, log_ratio, product
from streamrl.algo.tokens import TokenBatch
from streamrl.config.algo import AlgoConfig

LOG = math.log
# Two samples: ratios 4 and 0.5 (product 2, geometric mean sqrt 2), then 0.25, 1 and 2 (product 0.5).
RHO = [4.0, 0.5, 0.25, 1.0, 2.0]
SAMPLE = torch.tensor([0, 0, 1, 1, 1])
FRESH = torch.zeros(5, dtype=torch.int64)
AGED = torch.tensor([0, 2, 1, 3, 1])


def weights(staleness=FRESH, rho=RHO, *, scored=None, has_ratio=True, needs_cap=True, picked=None, **keys) -> Weights:
    """scored: ratios pi_old / mu of a scoring pass, for `proximal: recompute`; picked: tokens of the step's rules."""
    config = AlgoConfig(**keys)
    log_rho = torch.tensor(rho, dtype=torch.float64).log()
    mu = torch.full((5,), -3.0, dtype=torch.float64)
    picked = None if picked is None else torch.tensor(picked)
    tokens = TokenBatch(
        logprobs=mu + log_rho,
        entropy=None,
        behaviour=mu,
        advantages=mu,
        mask=torch.ones(5, dtype=torch.bool),
        staleness=staleness,
        sample=SAMPLE,
        samples=2,
        proximal=None if scored is None else mu + torch.tensor(scored, dtype=torch.float64).log(),
        outliers=picked,
        covariant=picked,
    )
    proximal = proximal_of(config).logprobs(mu, log_rho, staleness, tokens.proximal)
    return importance_weights(tokens, log_rho, proximal, config, has_ratio=has_ratio, needs_cap=needs_cap)


def test_weight_none_is_one_for_both_proximal_policies():
    for proximal in ("behaviour", "interpolate"):
        assert weights(AGED, weight="none", proximal=proximal).weight.tolist() == [1.0] * 5


def test_behaviour_divides_the_token_weight_by_the_ratio_so_that_only_the_cap_acts():
    assert weights(weight="token").weight.tolist() == pytest.approx([0.5, 1, 1, 1, 1])


def test_behaviour_with_sequence_weight_caps_the_product_for_all_tokens_of_the_sample():
    assert weights(weight="sequence", weight_cap=1.6).weight.tolist() == pytest.approx([0.8, 0.8, 1, 1, 1])


def test_a_weight_that_f_leaves_alone_is_exactly_one():
    assert weights(weight="token", weight_cap=4.0).weight.tolist() == [1.0] * 5


def test_the_cap_tightens_with_the_staleness_of_the_token():
    config = AlgoConfig(weight_cap=3.0, weight_gamma=0.5)
    assert weight_cap(AGED, torch.float64, config).tolist() == pytest.approx([3.0, 1.5, 2.0, 1.25, 2.0])
    rho = [4.0] * 5
    expected = [3 / 4, 1.5 / 4, 2 / 4, 1.25 / 4, 2 / 4]
    assert weights(AGED, rho, weight_cap=3.0, weight_gamma=0.5).weight.tolist() == pytest.approx(expected)


def test_the_cap_on_a_product_reads_the_oldest_token_of_the_sample():
    result = weights(AGED, [4.0] * 5, weight="sequence", weight_cap=3.0, weight_gamma=0.5)
    expected = [1.5 / 16] * 2 + [1.25 / 64] * 3
    assert result.weight.tolist() == pytest.approx(expected)


def test_interpolate_moves_the_proximal_policy_from_mu_towards_pi_with_age():
    mu = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64)
    log_rho = torch.tensor([0.6, 0.6, -0.9], dtype=torch.float64)
    staleness = torch.tensor([0, 2, 1])
    interpolated = proximal_of(AlgoConfig(proximal="interpolate")).logprobs(mu, log_rho, staleness, None)
    assert interpolated.tolist() == pytest.approx([-1.0, -0.6, -2.45])
    assert torch.equal(proximal_of(AlgoConfig()).logprobs(mu, log_rho, staleness, None), mu)


def test_interpolate_previous_counts_versions_as_areals_trainer_does_one_step_behind_interpolate():
    current = 7  # of the weights that the step starts from, which that trainer takes for pi
    made_by = torch.tensor([7, 6, 5, 3, 0])
    mu, log_rho = torch.full((5,), -2.0, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    expected = []
    for version in made_by.tolist():
        share = (current - 1 - version) / (current - version) if version < current else 0.0
        expected.append((1 - share) * -2.0 + share * -1.0)
    previous, start = (proximal_of(AlgoConfig(proximal=f"interpolate{end}")) for end in ("_previous", ""))
    assert previous.logprobs(mu, log_rho, current - made_by, None).tolist() == pytest.approx(expected)
    assert start.logprobs(mu, log_rho, current - made_by, None).tolist() != pytest.approx(expected)
    younger = (current - 1 - made_by).clamp(min=0)
    assert start.logprobs(mu, log_rho, younger, None).tolist() == pytest.approx(expected)


def test_interpolate_weighs_by_the_truncated_ratio_of_the_proximal_policy_to_mu():
    expected = [1.0, 0.5 ** (2 / 3), 0.25**0.5, 1.0, 2.0**0.5]
    result = weights(AGED, proximal="interpolate", weight_cap=1.3).weight
    assert result.tolist() == pytest.approx([min(value, 1.3) for value in expected])


def test_recompute_takes_the_scores_as_the_proximal_policy_and_weighs_by_their_truncated_ratio():
    mu = torch.tensor([-1.0, -2.0])
    scores = torch.tensor([-0.5, -3.0], requires_grad=True)
    proximal = proximal_of(AlgoConfig(proximal="recompute")).logprobs(mu, mu, FRESH[:2], scores)
    assert proximal.tolist() == [-0.5, -3.0]
    assert not proximal.requires_grad
    result = weights(AGED, scored=[3.0, 0.5, 1.0, 1.5, 2.5], proximal="recompute").weight
    assert result.tolist() == pytest.approx([2.0, 0.5, 1.0, 1.5, 2.0])


def test_a_family_without_a_ratio_gets_the_truncated_weight_itself():
    assert weights(has_ratio=False).weight.tolist() == pytest.approx([2.0, 0.5, 0.25, 1.0, 2.0])
    assert weights(has_ratio=False, weight="none").weight.tolist() == pytest.approx(RHO)
    assert weights(AGED, has_ratio=False, weight="none", proximal="interpolate").weight.tolist() == [1.0] * 5


def test_a_family_that_needs_no_cap_has_none_where_its_ratio_is_to_the_behaviour_policy():
    for weight in ("none", "token", "sequence"):
        assert weights(needs_cap=False, weight=weight).weight.tolist() == [1.0] * 5
        keys = {"weight": weight, "proximal": "interpolate"}
        assert torch.equal(weights(AGED, needs_cap=False, **keys).weight, weights(AGED, **keys).weight)
    kept = weights(AGED, needs_cap=False, mask="token", discount=0.5).weight.tolist()
    assert kept == [1.0, 0.25, 0.0, 0.125, 0.5]


def test_the_rules_of_the_whole_step_mask_what_they_picked():
    picked = [True, False, False, True, False]
    keys = {"scored": [1.0] * 5, "picked": picked, "proximal": "recompute", "weight": "none"}
    outliers = weights(mask="second_moment", **keys)
    assert (outliers.masked.tolist(), outliers.weight.tolist()) == (picked, [0.0, 1.0, 1.0, 0.0, 1.0])
    both = weights(mask="token", covariance="clip_cov", **(keys | {"scored": [1.0, 1.0, 9.0, 1.0, 1.0]}))
    assert both.weight.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert {name: mask.sum().item() for name, mask in both.masked_by.items()} == {"token": 1, "clip_cov": 2}
    assert not weights(covariance="kl_cov", **keys).masked.any()


def test_interpolate_with_sequence_weight_multiplies_those_ratios():
    product = [0.5 ** (2 / 3)] * 2 + [0.25**0.5 * 2.0**0.5] * 3
    result = weights(AGED, proximal="interpolate", weight="sequence").weight
    assert result.tolist() == pytest.approx(product)


def test_the_default_edges_are_those_of_the_rule_and_configured_ones_replace_them():
    assert mask_edges(AlgoConfig(mask="token")) == (0.5, 5.0)
    assert mask_edges(AlgoConfig(mask="sequence")) == (0.5, 2.0)
    assert mask_edges(AlgoConfig(mask="geometric")) == (0.99, 1.01)
    assert mask_edges(AlgoConfig(mask="token", mask_low=0.0)) == (0.0, 5.0)
    assert mask_edges(AlgoConfig(mask="token", mask_high=3.0)) == (0.5, 3.0)


def test_each_mask_reads_its_own_aggregate_and_keeps_its_edges():
    assert weights(mask="token").masked.tolist() == [False, False, True, False, False]
    assert weights(mask="token", mask_high=3.9).masked.tolist() == [True, False, True, False, False]
    assert weights(mask="sequence", mask_low=0.55, mask_high=2.1).masked.tolist() == [False] * 2 + [True] * 3
    assert weights(mask="geometric", mask_low=0.7, mask_high=1.5).masked.tolist() == [False] * 5
    assert weights(mask="geometric", mask_low=0.7, mask_high=1.4).masked.tolist() == [True] * 2 + [False] * 3
    assert weights(mask="geometric", mask_low=0.8, mask_high=1.5).masked.tolist() == [False] * 2 + [True] * 3


def test_a_masked_token_weighs_nothing_and_the_mask_reads_the_ratio_before_the_cap():
    result = weights(mask="token", mask_high=3.0, weight_cap=2.0)
    assert result.masked.tolist() == [True, False, True, False, False]
    assert result.weight.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_the_mask_of_interpolate_reads_the_proximal_ratio():
    # pi / mu = 4 is inside 0.5..5 and 0.25 is outside; at staleness 1 the proximal ratio 0.5 is on the edge.
    assert not weights(AGED, proximal="interpolate", mask="token", mask_low=0.499).masked.any()


def test_the_discount_multiplies_by_lambda_to_the_staleness_of_the_token():
    assert weights(AGED, weight="none", discount=0.5).weight.tolist() == [1.0, 0.25, 0.5, 0.125, 0.5]


def test_log_ratios_are_clamped_to_20_before_exp():
    assert bounded_exp(torch.tensor([1e9, -1e9, 20.5], dtype=torch.float64)).tolist() == pytest.approx(
        [math.exp(20), math.exp(-20), math.exp(20)]
    )


def test_the_product_is_clamped_after_the_sum_and_not_before_it():
    log_rho = torch.tensor([30.0, -29.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert product(log_rho, SAMPLE, 2).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert geometric_mean(log_rho, SAMPLE, 2).tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_a_log_ratio_is_finite_where_the_difference_overflows():
    log_rho = log_ratio(torch.tensor([-3e38, 3e38, LOG(0.5)]), torch.tensor([3e38, -3e38, LOG(0.25)]))
    assert log_rho.isfinite().all()
    assert log_rho[2].item() == pytest.approx(LOG(2.0))
