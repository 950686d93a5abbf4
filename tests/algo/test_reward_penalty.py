"""KL in the reward: each answer's penalty, the advantages that follow, and which answer a token is of."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.losses import GROUP, penalised
from benchmarks.losses_rewards import slow_penalised_advantages
from streamrl.algo.reward_penalty import Outcomes, penalised_advantages, reward_kl
from streamrl.choices import REWARD_DIVERGENCES
from streamrl.config.algo import AlgoConfig


def outcomes(trained: list[int], rewards: list[float], sizes: tuple[int, ...]) -> Outcomes:
    lengths = torch.tensor(trained)
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        valid=lengths > 0,
        first_place=lengths.cumsum(0) - lengths,
        lengths=lengths,
        sizes=sizes,
    )


def test_a_token_belongs_to_the_answer_that_has_its_place_also_among_empty_answers():
    known = outcomes([3, 0, 2, 0, 0, 1, 0], [0.0] * 7, (7,))
    assert known.answer_of(torch.tensor([5, 0, 2, 3, 4])).tolist() == [5, 0, 0, 2, 2]


@pytest.mark.parametrize("proximal", ["behaviour", "recompute"])
@pytest.mark.parametrize("estimator", REWARD_DIVERGENCES.names)
def test_the_advantages_equal_the_loop(token_batch, estimator, proximal):
    batch = token_batch(3, lengths=(5, 1, 7, 3, 6, 9, 4, 2))
    batch.behaviour[torch.tensor([2, 9])] = -math.inf
    config = AlgoConfig(kl_reward=0.3, kl_reward_estimator=estimator, proximal=proximal)
    rewards = [batch.advantages[batch.sample == sample][0].item() for sample in range(8)]
    expected = torch.tensor(slow_penalised_advantages(batch, rewards, GROUP, config), dtype=torch.float64)
    torch.testing.assert_close(penalised(batch, config, slow=False), expected[batch.sample], rtol=0, atol=1e-12)


def test_a_dropped_token_has_no_penalty_and_a_broken_reference_is_not_hidden():
    old, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-math.inf, -1.0])
    config = AlgoConfig(kl_reward=1.0)
    assert reward_kl(old, torch.tensor([-3.0, -1.5]), behaviour, config).tolist() == [0.0, 0.5]
    assert reward_kl(old, torch.tensor([math.nan, math.nan]), behaviour, config).isnan().tolist() == [False, True]


def test_answers_of_one_reward_differ_by_their_penalty_and_a_placeholder_stays_at_0():
    known = outcomes([2, 2, 0], [1.0, 1.0, 0.0], (3,))
    config = AlgoConfig(kl_reward=0.5, advantage={"std": "none"})
    advantages = penalised_advantages(known, torch.tensor([0.0, 0.4, 9.0]).double(), config)
    assert advantages.tolist() == pytest.approx([0.1, -0.1, 0.0])
