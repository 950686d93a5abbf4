"""Generalised advantage estimation at its edges; `test_losses_benchmark.py` has the comparison with a loop."""

import pytest
import torch

from streamrl.algo.gae import explained_variance, gae, moments, token_rewards, value_loss, whiten


def test_an_answer_that_is_worth_what_it_got_has_no_advantage_and_none_leaks_into_its_neighbour():
    sample = torch.tensor([0, 0, 0, 1, 1])
    rewards = token_rewards(torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]), sample)
    values = torch.tensor([1.0, 1.0, 1.0, 5.0, 7.0])
    for lam in (0.0, 0.5, 1.0):
        found = gae(rewards, values, sample, gamma=1.0, lam=lam)
        assert torch.equal(found[:3], torch.zeros(3, dtype=torch.float64))
        assert found[4] == -9.0
    assert gae(rewards, values, sample, gamma=1.0, lam=1.0)[3] == -7.0


def test_a_row_without_tokens_and_values_that_are_all_alike_are_nothing_special():
    none = torch.zeros(0)
    assert gae(none, none, none.long(), gamma=1.0, lam=1.0).shape == (0,)
    assert whiten(none, moments(none)).shape == (0,)
    alike = torch.full((4,), 3.0)
    assert torch.equal(whiten(alike, moments(alike)), torch.zeros(4, dtype=torch.float64))
    assert explained_variance(moments(alike), moments(alike)) is None


def test_returns_that_are_alike_but_for_the_rounding_of_their_sums_have_no_variance_to_explain():
    draws = torch.Generator().manual_seed(0)
    returns, errors = torch.full((495,), 0.7), torch.randn(495, generator=draws)
    of_all = [sum(moments(part) for part in each.split([200, 295])) for each in (returns, errors)]
    assert explained_variance(*of_all) is None
    spread = 1 + 1e-4 * torch.randn(495, generator=draws, dtype=torch.float64)
    assert explained_variance(moments(spread), moments(0.1 * spread)) == pytest.approx(0.99, abs=1e-6)


def test_whitening_by_parts_is_that_of_the_whole():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_all = moments(values[:20]) + moments(values[20:])
    found = whiten(values, of_all)
    assert float(found.mean()) == pytest.approx(0, abs=1e-12)
    assert float(found.std()) == pytest.approx(1, rel=1e-6)


def test_a_value_that_has_gone_far_enough_pulls_no_further():
    values = torch.tensor([0.9, 0.2, -0.9], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.ones(3), clip=0.5)
    loss.sum().backward()
    assert clipped.tolist() == [True, False, False]
    assert values.grad.tolist() == [0.0, pytest.approx(-0.8), pytest.approx(-1.9)]
