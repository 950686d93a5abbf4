"""The effective sample size of each group against a loop over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.algo.tokens import TokenBatch
from streamrl.learner.group_ess import GroupEss, ends_of, of_sums


def tokens_of(log_rho: np.ndarray, advantages: np.ndarray, behaviour: float | np.ndarray = -1.0) -> TokenBatch:
    """Tokens whose policy is log_rho over the behaviour policy."""
    count = len(log_rho)
    base = torch.as_tensor(np.broadcast_to(behaviour, count).copy(), dtype=torch.float64)
    return TokenBatch(
        logprobs=base.nan_to_num() + torch.from_numpy(log_rho),
        entropy=None,
        behaviour=base,
        advantages=torch.from_numpy(advantages),
        mask=torch.ones(count, dtype=torch.bool),
        staleness=torch.zeros(count, dtype=torch.int64),
        sample=torch.zeros(count, dtype=torch.int64),
        samples=1,
    )


@pytest.mark.parametrize("taught", [False, True])
def test_it_is_that_of_each_groups_tokens_however_they_are_packed(taught: bool, make_group) -> None:
    lengths = [5, 0, 3, 4]  # the second has no trained token, the third no advantage
    chance = np.random.default_rng(7)
    log_rho = chance.normal(size=sum(lengths))
    advantages = np.repeat([1.0, 0.0, 0.0, -0.5], lengths)
    behaviour = np.full(sum(lengths), -1.0)
    behaviour[0] = np.nan  # dropped, as in the loss
    measured = GroupEss(taught=taught)
    measured.begin(np.cumsum(lengths), torch.device("cpu"))
    places = chance.permutation(sum(lengths))
    for place in (places[:7], places[7:]):
        measured.add(place, tokens_of(log_rho[place], advantages[place], behaviour[place]))
    expected: list[float | None] = []
    for start, length, has_signal in zip((0, 5, 5, 8), lengths, (True, False, taught, True), strict=True):
        rho = np.exp(log_rho[start : start + length][np.isfinite(behaviour[start : start + length])])
        expected.append(rho.sum() ** 2 / (len(rho) * (rho**2).sum()) if has_signal else None)
    assert of_sums(measured._sums) == [each if each is None else pytest.approx(each) for each in expected]


def test_a_group_with_a_log_prob_that_is_no_number_has_none_and_the_others_keep_theirs() -> None:
    measured = GroupEss(taught=False)
    measured.begin(np.array([2, 4]), torch.device("cpu"))
    measured.add(np.arange(4), tokens_of(np.array([np.nan, 0.0, 0.5, 0.5]), np.ones(4)))
    assert of_sums(measured._sums) == [None, pytest.approx(1.0)]


def test_groups_end_where_their_trained_tokens_do(make_group) -> None:
    groups = [make_group(0), make_group(1)]
    assert ends_of(groups).tolist() == [groups[0].trained_tokens, 2 * groups[0].trained_tokens]
