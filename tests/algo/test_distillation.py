"""The teacher's part in the advantages: against a loop over tokens, and against the gradient of the divergence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from benchmarks.losses_reference import slow_covariant, slow_loss
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.diagnostics import finish
from streamrl.algo.losses import policy_loss
from streamrl.algo.tokens import TokenBatch
from streamrl.algo.whole_step import StepTokens, select
from streamrl.choices import LOSSES, PROXIMALS
from streamrl.config.algo import AlgoConfig

COUNTS = Denominators(tokens=50, rollouts=9)


def taught(*, rewards: bool = True, coefficient: float = 0.7, **keys: Any) -> AlgoConfig:
    distillation = {"teacher": "teacher", "rewards": rewards, "coefficient": coefficient}
    return AlgoConfig.model_validate({"distillation": distillation, **keys})


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("proximal", PROXIMALS.names)
@pytest.mark.parametrize("loss", LOSSES.names)
def test_value_and_gradients_equal_the_loop(token_batch, loss, proximal, rewards):
    batch = token_batch(3, spread=0.6)
    batch.behaviour[torch.tensor([2, 9])] = -math.inf
    batch.teacher[4] = -100.0  # beyond the clamp
    config = taught(loss=loss, proximal=proximal, rewards=rewards, kl=0.3)
    value, _ = policy_loss(batch, config, COUNTS)
    expected, _ = slow_loss(batch, config, tokens=50, samples=9)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    (fast,), (slow,) = (torch.autograd.grad(each, batch.logprobs) for each in (value, expected))
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("covariance", ["clip_cov", "kl_cov"])
def test_rules_of_the_whole_step_read_the_same_advantages(token_batch, covariance):
    batch = token_batch(5, lengths=(40, 60, 50), spread=0.6, mask=torch.ones(150, dtype=torch.bool))
    scores, place = batch.logprobs.detach(), torch.arange(150)
    keys = {"covariance": covariance, "covariance_share": 0.1, "covariance_low": 0.1}
    step = StepTokens(
        scores=scores,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        staleness=batch.staleness,
        place=place,
        teacher=batch.teacher,
    )
    picked = select(step, 7, taught(**keys)).covariant
    assert picked.tolist() == slow_covariant(scores, batch, place, 7, taught(**keys))
    assert not torch.equal(picked, select(step, 7, AlgoConfig(**keys)).covariant)


def test_over_stale_tokens_the_expected_gradient_is_that_of_the_reverse_kl():
    """All tokens of a small vocabulary, each with its probability under another policy that drew it."""
    draw = torch.Generator().manual_seed(1)
    logits, mu, teacher = (
        torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(0).requires_grad_(index == 0)
        for index in range(3)
    )
    logprobs = logits.log_softmax(0)
    batch = of_tokens(logprobs.detach().requires_grad_(), mu, teacher)
    config = taught(loss="reinforce", weight="none", rewards=False, coefficient=1.0)
    loss, _ = policy_loss(batch, config, Denominators(tokens=1, rollouts=1))
    (of_tokens_drawn,) = torch.autograd.grad(loss, batch.logprobs)
    (estimated,) = torch.autograd.grad((mu.exp() * of_tokens_drawn * logprobs).sum(), logits, retain_graph=True)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(estimated, exact, rtol=0, atol=1e-12)
    assert exact.abs().max() > 0.01


def of_tokens(logprobs: torch.Tensor, behaviour: torch.Tensor, teacher: torch.Tensor) -> TokenBatch:
    """One answer of these tokens, five steps old."""
    return TokenBatch(
        logprobs=logprobs,
        entropy=None,
        behaviour=behaviour,
        advantages=torch.ones_like(behaviour),
        mask=torch.ones_like(behaviour, dtype=torch.bool),
        staleness=torch.full_like(behaviour, 5, dtype=torch.int64),
        sample=torch.zeros_like(behaviour, dtype=torch.int64),
        samples=1,
        teacher=teacher,
    )


@pytest.mark.parametrize("loss", [name for name in LOSSES.names if name != "dro"])  # whose pull is to the behaviour
def test_a_policy_that_has_become_its_teacher_is_left_alone_however_stale_the_tokens(token_batch, loss):
    batch = token_batch(1, spread=0.6)
    batch = dataclasses.replace(batch, teacher=batch.logprobs.detach().clone())
    value, sums = policy_loss(batch, taught(loss=loss, rewards=False), COUNTS)
    assert not torch.autograd.grad(value, batch.logprobs)[0].any()
    assert finish(sums)["distillation/kl"] == 0


def test_the_metric_is_the_mean_over_measured_tokens_by_staleness_too_and_absent_without_a_teacher(token_batch):
    batch = token_batch(2)
    batch.behaviour[3] = -math.inf
    measured = batch.mask & batch.behaviour.isfinite()
    gaps = (batch.logprobs.detach() - batch.teacher)[measured]
    metrics = finish(policy_loss(batch, taught(), COUNTS)[1])
    assert metrics["distillation/kl"] == pytest.approx(gaps.mean().item())
    stale = gaps[batch.staleness[measured] >= 9]
    assert metrics["distillation/kl/s9+"] == pytest.approx(stale.mean().item())
    assert not any("distillation" in name for name in finish(policy_loss(batch, AlgoConfig(), COUNTS)[1]))


@pytest.mark.parametrize("far", [-3e38, -1e4, 1e4])
@pytest.mark.parametrize("loss", LOSSES.names)
def test_no_finite_word_of_a_teacher_makes_an_infinite_loss(token_batch, loss, far):
    batch = token_batch(1, dtype=torch.float32)
    batch = dataclasses.replace(batch, teacher=torch.full_like(batch.behaviour, far))
    value, _ = policy_loss(batch, taught(loss=loss), COUNTS)
    assert value.isfinite()
    assert torch.autograd.grad(value, batch.logprobs)[0].isfinite().all()


def test_a_batch_without_the_teachers_log_probs_is_refused_by_name(token_batch):
    batch = token_batch(1, teacher=None)
    with pytest.raises(ValueError, match=r"teacher is None, algo\.distillation\.teacher=teacher needs it"):
        policy_loss(batch, taught(), COUNTS)


def test_a_group_of_one_answer_has_something_to_learn_from_a_teacher_alone():
    assert AlgoConfig().least_samples == 2
    assert taught().least_samples == 1
