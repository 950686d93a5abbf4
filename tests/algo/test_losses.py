"""The policy loss against a loop that reads like the equations, and the invariants it has to keep."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.losses import LIMITS
from benchmarks.losses_reference import slow_loss
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.clipping import clipped_surrogate
from streamrl.algo.diagnostics import finish, merge
from streamrl.algo.losses import policy_loss, reference_kl
from streamrl.algo.tokens import TokenBatch
from streamrl.choices import AGGREGATIONS, DIVERGENCES, LOSSES, PROXIMALS
from streamrl.config.algo import AlgoConfig

COVARIANCES = ("none", "clip_cov", "kl_cov")
MASKS = ("none", "token", "sequence", "geometric", "second_moment")
IN_TURN = (AGGREGATIONS.names, COVARIANCES, DIVERGENCES.names, tuple(LIMITS))
COMBINATIONS = [
    (*choice, *(names[(index + index // 60 * place) % len(names)] for place, names in enumerate(IN_TURN)))
    for index, choice in enumerate(
        itertools.product(LOSSES.names, PROXIMALS.names, ("none", "token", "sequence"), MASKS)
    )
    if choice[1] == "recompute" or choice[3] != "second_moment"
]
"""Every family with every proximal policy, weight and mask; aggregations, covariance rules, estimators and further
masks in turn."""
EVERYTHING = ("loss", "proximal", "weight", "mask", "aggregation", "covariance", "kl_estimator", "more_masks")


def some(choices):
    """As parameters: one in seven for `make test`, the others for `make test-all`."""
    return [pytest.param(each, marks=[] if index % 7 == 0 else pytest.mark.slow) for index, each in enumerate(choices)]


def config_of(choice=None, **keys) -> AlgoConfig:
    """choice: one of COMBINATIONS; further keys beside it."""
    keys = dict(zip(EVERYTHING, choice or (), strict=False)) | {"norm_length": 20} | keys
    if isinstance(further := keys.get("more_masks"), str):
        keys["more_masks"] = [{"mask": further, "mask_high": LIMITS[further]}]
    if keys.get("mask") == "geometric":
        keys = {"mask_low": 0.8, "mask_high": 1.2} | keys
    if keys.get("loss", "clip") not in ("clip", "gspo"):
        keys.pop("dual_clip", None)
    return AlgoConfig(**keys)


def denominators_of(*batches: TokenBatch) -> Denominators:
    return Denominators.of(batch.mask[batch.sample == sample] for batch in batches for sample in range(batch.samples))


def loss_and_gradient(batch: TokenBatch, config: AlgoConfig, denominators: Denominators | None = None):
    loss, sums = policy_loss(batch, config, denominators or denominators_of(batch))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return loss.detach(), gradient, sums


@pytest.mark.parametrize("choice", some(COMBINATIONS), ids="-".join)
def test_value_and_gradients_equal_the_loop(token_batch, choice):
    batch = token_batch(3, spread=0.6)
    batch.behaviour[torch.tensor([2, 9])] = -math.inf
    keys = {"weight_cap": 1.5, "weight_gamma": 0.8, "discount": 0.9, "entropy": 0.01, "dual_clip": 1.6, "kl": 0.3}
    config = config_of(choice, **keys)
    value, _ = policy_loss(batch, config, Denominators(tokens=50, rollouts=9))
    expected, _ = slow_loss(batch, config, tokens=50, samples=9)
    leaves = (batch.logprobs, batch.entropy)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    for fast, slow in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


ON_POLICY = list(itertools.product(PROXIMALS.names, ("none", "token", "sequence"), LOSSES.names, AGGREGATIONS.names))


@pytest.mark.parametrize("choice", some(ON_POLICY), ids="-".join)
def test_on_policy_the_gradient_is_that_of_reinforce_with_a_baseline(token_batch, choice):
    proximal, weight, loss, aggregation = choice
    batch = token_batch(1, spread=0.0)
    config = config_of((loss, proximal, weight, "geometric", aggregation), kl=0.7)
    if loss in ("gmpo", "gspo"):  # its gradient is an answer's as a whole: the same where every token counts the same
        batch = dataclasses.replace(batch, mask=torch.ones_like(batch.mask))
    _, gradient, _ = loss_and_gradient(batch, config)
    per_token = torch.where(batch.mask, batch.advantages * batch.logprobs, 0.0)
    rows = [(per_token[batch.sample == i], batch.mask[batch.sample == i].sum()) for i in range(batch.samples)]
    reinforce = {
        "token_mean": -per_token.sum() / batch.mask.sum(),
        "token_sum": -per_token.sum(),
        "sequence_sum": -per_token.sum() / batch.samples,
        "sequence_mean": -sum(row.sum() / max(length, 1) for row, length in rows) / batch.samples,
        "sequence_sum_norm": -per_token.sum() / (20 * batch.samples),
    }[aggregation]
    assert all(length > 0 for _, length in rows)
    torch.testing.assert_close(gradient, torch.autograd.grad(reinforce, batch.logprobs)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope", "name"),
    [
        (1.5, 2.0, 1.28 * 2, 0.0, "clip_high"),
        (0.5, 2.0, 1.0, 2.0, None),
        (1.5, -2.0, -3.0, -2.0, None),
        (0.5, -2.0, -1.6, 0.0, "clip_low"),
        (1.1, 2.0, 2.2, 2.0, None),
        (4.0, -2.0, -6.0, 0.0, "clip_dual"),
        (4.0, 2.0, 2.56, 0.0, "clip_high"),
    ],
)
def test_each_branch_of_the_clip_has_its_value_and_slope(ratio, advantage, surrogate, slope, name):
    r = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    value, clipped = clipped_surrogate(r, a, AlgoConfig(dual_clip=3.0))
    assert value.item() == pytest.approx(surrogate)
    assert torch.autograd.grad(value, r)[0].item() == pytest.approx(slope)
    assert [key for key, taken in clipped.items() if taken.item()] == ([name] if name else [])


def one_token(
    logprob: float, *, loss: str, advantage: float = 1.0, weight: str = "none", **keys
) -> tuple[float, float]:
    """Loss and gradient of a single fresh token with log mu = -1."""
    one = torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(
        logprobs=(one * logprob).requires_grad_(),
        entropy=None,
        behaviour=-one,
        advantages=one * advantage,
        mask=one > 0,
        staleness=torch.zeros(1, dtype=torch.int64),
        sample=torch.zeros(1, dtype=torch.int64),
        samples=1,
    )
    value, gradient, _ = loss_and_gradient(batch, AlgoConfig(loss=loss, weight=weight, **keys))
    return value.item(), gradient.item()


def test_cispo_keeps_the_gradient_of_a_token_that_the_clip_stops():
    assert one_token(-0.5, loss="clip")[1] == 0
    value, slope = one_token(-0.5, loss="cispo")
    assert (value, slope) == (pytest.approx(1.28 * 0.5), pytest.approx(-1.28))
    assert one_token(-2.0, loss="cispo", advantage=-1.0)[1] == pytest.approx(0.8)


def test_no_loss_that_bounds_its_ratio_is_capped_again_by_the_default_weight():
    far = -1 + math.log(8)  # r = 8, and C = 2
    assert one_token(far, loss="cispo", weight="token")[1] == pytest.approx(-1.28)
    assert one_token(far, loss="cispo", weight="token", advantage=-1.0)[1] == pytest.approx(1.28)
    assert one_token(far, loss="clip", weight="token", advantage=-1.0)[1] == pytest.approx(2.0)
    for loss in (name for name in LOSSES.names if name not in ("clip", "reinforce")):
        for advantage in (1.0, -1.0):
            default, plain = (one_token(far, loss=loss, advantage=advantage, weight=of) for of in ("token", "none"))
            assert default == plain, loss


def test_a_large_ratio_of_one_token_does_not_change_the_gradient_of_gspo():
    log_r = torch.tensor([math.log(4), -math.log(4)], dtype=torch.float64)  # of the sample: 1
    behaviour = torch.full((2,), -2.0, dtype=torch.float64)
    batch = TokenBatch(
        logprobs=(behaviour + log_r).requires_grad_(),
        entropy=None,
        behaviour=behaviour,
        advantages=torch.ones(2, dtype=torch.float64),
        mask=torch.ones(2, dtype=torch.bool),
        staleness=torch.zeros(2, dtype=torch.int64),
        sample=torch.zeros(2, dtype=torch.int64),
        samples=1,
    )
    _, gradient, _ = loss_and_gradient(batch, AlgoConfig(loss="gspo"))
    assert gradient.tolist() == pytest.approx([-0.5, -0.5])


def test_sapo_fades_a_gradient_out_where_the_clip_cuts_it_off():
    assert one_token(-1.0, loss="sapo")[1] == pytest.approx(-1)  # r = 1: the gradient of the ratio itself
    assert -1.5 < one_token(-0.5, loss="sapo")[1] < -1 < one_token(-0.5, loss="clip")[1] == 0
    assert -1e-5 < one_token(2.0, loss="sapo")[1] < 0
    soft, hard = (one_token(0.0, loss="sapo", advantage=-1.0, sapo_negative=tau)[1] for tau in (1.05, 4.0))
    assert 0 < hard < 0.1 < soft


def test_reinforce_weighs_by_the_truncated_ratio_alone():
    rho = math.exp(0.5)
    assert one_token(-0.5, loss="reinforce")[1] == pytest.approx(-rho)  # weight none: f = q, nothing is truncated
    assert one_token(-0.5, loss="reinforce", proximal="interpolate")[1] == pytest.approx(-1)  # f = 1
    assert one_token(-0.5, loss="reinforce", weight="token", weight_cap=1.2)[1] == pytest.approx(-1.2)


def test_gspo_clips_all_tokens_of_an_answer_or_none(token_batch):
    batch = token_batch(4, lengths=(6, 8, 5), mask=torch.ones(19, dtype=torch.bool), spread=0.3)
    config = AlgoConfig(loss="gspo", weight="none", eps_low=0.02, eps_high=0.02)
    _, gradient, _ = loss_and_gradient(batch, config)
    stopped = gradient == 0
    by_answer = [stopped[batch.sample == i] for i in range(3)]
    assert all(bool(answer.all()) or not answer.any() for answer in by_answer)
    assert 0 < sum(bool(answer.all()) for answer in by_answer) < 3


def test_the_kl_term_pulls_towards_the_reference_and_never_the_wrong_way():
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -40.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.5, -2.0, -1.0, -40.0], dtype=torch.float64)
    kl = reference_kl(logprobs, reference, AlgoConfig())
    assert kl[:3].tolist() == pytest.approx([0, math.exp(0.5) - 1.5, math.exp(-1)])
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient.sign().tolist() == [0, -1, 1, 0, 0]  # beyond the bound of 20 nothing pulls


def test_k3_of_policies_that_hardly_differ_is_not_lost_in_float32():
    draws = torch.Generator().manual_seed(0)
    reference = -5 * torch.rand(4096, generator=draws)
    logprobs = (reference + 1e-4 * torch.randn(4096, generator=draws)).requires_grad_()
    kl = reference_kl(logprobs, reference, AlgoConfig())
    exact = (reference - logprobs.detach()).double()
    assert kl.dtype == torch.float32
    assert bool((kl >= 0).all())
    torch.testing.assert_close(kl.double(), torch.expm1(exact) - exact, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    torch.testing.assert_close(gradient.double(), -torch.expm1(exact), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", DIVERGENCES.names)
def test_straight_through_keeps_the_value_of_an_estimator_and_takes_the_gradient_of_k2(name):
    logprobs = torch.tensor([-1.0, -1.5, -6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.5, -1.0], dtype=torch.float64)
    if DIVERGENCES.load(name).follows_k2:
        with pytest.raises(ValueError, match=f"kl_straight_through: true does nothing with kl_estimator={name}"):
            AlgoConfig(kl_estimator=name, kl_straight_through=True)
        return
    plain, through = (
        reference_kl(logprobs, reference, AlgoConfig(kl_estimator=name, kl_straight_through=given))
        for given in (False, True)
    )
    assert torch.equal(plain, through)
    (gradient,) = torch.autograd.grad(through.sum(), logprobs)
    assert gradient.tolist() == [0.0, -1.0, -5.0]


def test_the_limit_of_the_clamped_estimator_is_ten_nats_and_stops_its_gradient():
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    kl = reference_kl(logprobs, reference, AlgoConfig(kl_estimator="k3_clamped"))
    assert kl.tolist() == [pytest.approx(math.exp(2) - 3), 10.0]
    assert torch.autograd.grad(kl.sum(), logprobs)[0].tolist() == [pytest.approx(1 - math.exp(2)), 0.0]


def test_gmpo_clips_each_log_ratio_before_the_mean(token_batch):
    batch = token_batch(
        4, lengths=(3,), mask=torch.ones(3, dtype=torch.bool), advantages=torch.full((3,), 2.0).double()
    )
    batch = dataclasses.replace(batch, behaviour=batch.logprobs.detach() - torch.tensor([0.9, 0.1, -0.9]).double())
    config = AlgoConfig(loss="gmpo", weight="none", eps_low=0.4, eps_high=0.4, aggregation="sequence_mean")
    loss, gradient, sums = loss_and_gradient(batch, config)
    assert loss.item() == pytest.approx(-2 * math.exp((0.4 + 0.1 - 0.9) / 3))
    assert gradient.tolist() == pytest.approx([0.0, loss.item() / 3, loss.item() / 3])
    assert finish(sums)["loss/clip_high"] == pytest.approx(1 / 3)


def test_a_token_stays_where_every_mask_of_a_chain_keeps_it(token_batch):
    batch = token_batch(4)
    alone = [
        {"mask": "token", "mask_high": 1.5},
        {"mask": "sequence_mean_k3", "mask_high": 0.1},
        {"mask": "token_k2", "mask_high": 0.1},
    ]
    taken = [masked_by(batch, AlgoConfig(**keys)) for keys in alone]
    chain = masked_by(batch, AlgoConfig(**alone[0], more_masks=alone[1:]))
    expected = {name: share for each in taken for name, share in each.items() if name != "weights/masked"}
    assert {name: chain[name] for name in expected} == expected
    assert max(expected.values()) < chain["weights/masked"] < sum(expected.values())
    twice = masked_by(batch, AlgoConfig(mask="token_k2", mask_high=0.02, more_masks=[alone[2]]))
    assert twice == masked_by(batch, AlgoConfig(mask="token_k2", mask_high=0.02))


def masked_by(batch: TokenBatch, config: AlgoConfig) -> dict[str, float]:
    metrics = finish(policy_loss(batch, config, denominators_of(batch))[1])
    return {
        name: value for name, value in metrics.items() if name.startswith("weights/masked") and name.count("/") == 1
    }


def test_without_dual_clip_a_negative_advantage_is_not_bounded():
    value, clipped = clipped_surrogate(torch.tensor([40.0]), torch.tensor([-1.0]), AlgoConfig())
    assert value.item() == -40.0
    assert not clipped["clip_dual"].any()


def test_the_default_weight_bounds_what_the_clip_lets_through():
    one = torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(
        logprobs=(one * math.log(0.8)).requires_grad_(),
        entropy=None,
        behaviour=one * math.log(0.01),  # ratio 80
        advantages=-one,
        mask=one > 0,
        staleness=torch.zeros(1, dtype=torch.int64),
        sample=torch.zeros(1, dtype=torch.int64),
        samples=1,
    )
    loss, gradient, _ = loss_and_gradient(batch, AlgoConfig())
    assert loss.item() == pytest.approx(2.0)
    assert gradient.item() == pytest.approx(2.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
def test_masked_and_dropped_tokens_stay_in_the_denominator_and_untrained_ones_are_not_in_it(token_batch, aggregation):
    trained = torch.tensor([True, True, True, False, True, True])
    batch = token_batch(0, lengths=(4, 2), mask=trained, spread=0.0)
    batch.behaviour[0] = -math.inf  # dropped
    batch.behaviour[4] -= 3.0  # rho = e^3 is outside the mask's 0.5..5
    _, gradient, sums = loss_and_gradient(batch, config_of(mask="token", aggregation=aggregation))
    share = {
        "token_mean": [1 / 5] * 6,
        "token_sum": [1.0] * 6,
        "sequence_mean": [1 / 6] * 4 + [1 / 4] * 2,
        "sequence_sum": [1 / 2] * 6,
        "sequence_sum_norm": [1 / 40] * 6,
    }
    expected = [-batch.advantages[t].item() * share[aggregation][t] if t in (1, 2, 5) else 0.0 for t in range(6)]
    assert gradient.tolist() == pytest.approx(expected)
    metrics = finish(sums)
    assert (metrics["tokens/trained"], metrics["tokens/dropped"], metrics["weights/masked"]) == (5, 1, 0.25)


def test_denominators_count_trained_tokens_and_the_samples_that_have_any():
    masks = [np.array([True, True, False]), torch.tensor([False, False]), torch.tensor([], dtype=torch.bool)]
    assert Denominators.of(masks) == Denominators(tokens=2, rollouts=1)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_a_token_whose_behaviour_is_not_finite_is_dropped_counted_and_harmless(token_batch, bad):
    batch = token_batch(5, mask=torch.ones(31, dtype=torch.bool))
    batch.behaviour[4] = bad
    loss, _ = policy_loss(batch, AlgoConfig(entropy=0.1), denominators_of(batch))
    gradient, entropy_gradient = torch.autograd.grad(loss, (batch.logprobs, batch.entropy))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[4] == 0
    assert entropy_gradient[4] == 0
    assert finish(policy_loss(batch, AlgoConfig(), denominators_of(batch))[1])["tokens/dropped"] == 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
def test_whatever_an_untrained_token_holds_changes_nothing(token_batch, aggregation):
    config = config_of(("clip", "interpolate", "sequence", "geometric", aggregation), entropy=0.1)
    batch = token_batch(2)
    off = ~batch.mask
    spoiled = dataclasses.replace(
        batch,
        logprobs=torch.where(off, math.nan, batch.logprobs.detach()).requires_grad_(),
        entropy=torch.where(off, math.nan, batch.entropy.detach()).requires_grad_(),
        behaviour=torch.where(off, -math.inf, batch.behaviour),
        advantages=torch.where(off, math.inf, batch.advantages),
        staleness=torch.where(off, 90, batch.staleness),
    )
    loss, gradient, sums = loss_and_gradient(batch, config)
    other, other_gradient, other_sums = loss_and_gradient(spoiled, config)
    assert torch.equal(loss, other)
    assert torch.equal(gradient, other_gradient)
    assert finish(sums) == finish(other_sums)


def test_a_log_prob_of_the_learner_that_is_nan_is_not_hidden(token_batch):
    batch = token_batch(0, mask=torch.ones(31, dtype=torch.bool))
    with torch.no_grad():
        batch.logprobs[3] = math.nan
    assert policy_loss(batch, AlgoConfig(), denominators_of(batch))[0].isnan()


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
@pytest.mark.parametrize("lengths", [(3, 2), ()])
def test_a_batch_without_a_trained_token_gives_zero_and_zero_gradients(token_batch, aggregation, lengths):
    batch = token_batch(0, lengths=lengths, mask=torch.zeros(sum(lengths), dtype=torch.bool))
    config = config_of(("clip", "interpolate", "sequence", "geometric", aggregation), entropy=0.1)
    for denominators in (Denominators(0, 0), Denominators(12, 4)):
        loss, gradient, sums = loss_and_gradient(batch, config, denominators)
        assert loss == 0
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert all(math.isfinite(value) for value in finish(sums).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_keeps_the_dtype_of_the_log_probs(token_batch, dtype):
    batch = token_batch(0, dtype=dtype)
    loss, gradient, _ = loss_and_gradient(batch, config_of(weight="sequence", mask="geometric", discount=0.9))
    assert loss.dtype == gradient.dtype == dtype


def test_every_tensor_is_made_on_the_device_of_the_batch(token_batch):
    batch = token_batch(0)
    denominators = denominators_of(batch)
    for choice in COMBINATIONS:
        with torch.device("meta"):  # a tensor made without a device would not mix with the batch's
            _, sums = policy_loss(batch, config_of(choice, kl=0.1), denominators)
        assert {value.device.type for value in sums.values()} == {"cpu"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", torch.zeros(31, dtype=torch.bfloat16), "logprobs is torch.bfloat16"),
        ("behaviour", torch.zeros(31, dtype=torch.float32), "behaviour is torch.float32"),
        ("staleness", torch.zeros(30, dtype=torch.int64), r"staleness is torch.int64 \[30\]"),
        ("mask", torch.zeros(31), "mask is torch.float32"),
        ("reference", torch.zeros(30, dtype=torch.float64), r"reference is torch.float64 \[30\]"),
        ("outliers", torch.zeros(31), "outliers is torch.float32"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(token_batch, field, value, message):
    with pytest.raises(ValueError, match=message):
        token_batch(0, **{field: value})


@pytest.mark.parametrize(
    ("field", "setting", "named"),
    [
        ("proximal", {"proximal": "recompute"}, r"algo\.proximal=recompute"),
        ("reference", {"kl": 0.01}, r"algo\.kl=0\.01"),
        ("reference", {"kl": 0.01, "kl_estimator": "k1"}, r"algo\.kl=0\.01"),
        ("mean_weight", {"proximal": "recompute", "weight_normalise": True}, r"algo\.weight_normalise=true"),
        ("outliers", {"proximal": "recompute", "mask": "second_moment"}, r"algo\.mask=second_moment"),
        ("covariant", {"covariance": "clip_cov"}, r"algo\.covariance=clip_cov"),
        ("covariant", {"covariance": "kl_cov"}, r"algo\.covariance=kl_cov"),
    ],
)
def test_a_setting_without_the_field_that_it_reads_is_refused_by_both_names(token_batch, field, setting, named):
    batch = token_batch(0, **{field: None})
    policy_loss(batch, AlgoConfig(), denominators_of(batch))
    with pytest.raises(ValueError, match=f"{field} is None, {named}"):
        policy_loss(batch, AlgoConfig(**setting), denominators_of(batch))


def test_an_entropy_bonus_without_entropy_is_refused(token_batch):
    batch = token_batch(0, entropy=None)
    assert "loss/entropy" not in finish(policy_loss(batch, AlgoConfig(), denominators_of(batch))[1])
    with pytest.raises(ValueError, match=r"algo\.entropy=0\.1"):
        policy_loss(batch, AlgoConfig(entropy=0.1), denominators_of(batch))


def only(batch: TokenBatch, samples: list[int]) -> TokenBatch:
    """A micro batch of the given samples, renumbered."""
    index = torch.cat([(batch.sample == sample).nonzero().squeeze(-1) for sample in samples])
    lengths = torch.tensor([int((batch.sample == sample).sum()) for sample in samples])
    numbers = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return dataclasses.replace(batch.select(index), sample=numbers, samples=len(samples))


@pytest.mark.parametrize("choice", some(COMBINATIONS), ids="-".join)
def test_neither_order_nor_micro_batches_nor_packing_change_loss_gradient_or_metrics(token_batch, choice):
    batch = token_batch(7)
    batch.behaviour[4] = -math.inf
    config = config_of(choice, discount=0.9, entropy=0.01, kl=0.1)
    value, gradient, sums = loss_and_gradient(batch, config)
    metrics = finish(sums)

    shuffled = batch.select(torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(1)))
    for parts in ([shuffled], [only(batch, [4, 0]), only(batch, [2]), only(batch, [5, 1, 3])]):
        results = [policy_loss(part, config, denominators_of(batch)) for part in parts]
        total = torch.stack([part_loss for part_loss, _ in results]).sum()
        other = finish(merge(part_sums for _, part_sums in results))
        assert total.item() == pytest.approx(value.item(), abs=1e-12)
        torch.testing.assert_close(torch.autograd.grad(total, batch.logprobs)[0], gradient, rtol=0, atol=1e-12)
        assert other == pytest.approx(metrics, abs=1e-12)


def finite_loss(logprobs: list[float], behaviour: list[float], dtype: torch.dtype, config: AlgoConfig) -> None:
    count = len(logprobs)
    batch = TokenBatch(
        logprobs=torch.tensor(logprobs, dtype=dtype, requires_grad=True),
        entropy=None,
        behaviour=torch.tensor(behaviour, dtype=dtype),
        advantages=torch.tensor([1e3 * (-1) ** i for i in range(count)], dtype=dtype),
        mask=torch.tensor([i % 5 != 4 for i in range(count)], dtype=torch.bool),
        staleness=torch.tensor([i**4 for i in range(count)], dtype=torch.int64),
        sample=torch.tensor([i // 3 for i in range(count)], dtype=torch.int64),
        samples=(count + 2) // 3,
        proximal=torch.tensor(logprobs[::-1], dtype=dtype),
        reference=torch.tensor(logprobs[1:] + logprobs[:1], dtype=dtype),
        full_kl=torch.tensor(logprobs, dtype=dtype).abs(),
        outliers=torch.tensor([i % 3 == 0 for i in range(count)], dtype=torch.bool),
        covariant=torch.tensor([i % 2 == 0 for i in range(count)], dtype=torch.bool),
    )
    loss, gradient, sums = loss_and_gradient(batch, config)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in finish(sums).values())


@pytest.mark.parametrize("loss", LOSSES.names)
def test_the_largest_log_probs_of_float32_give_no_infinity(loss):
    finite_loss([-3e38, 3e38, -3e38, -1.0], [0.0, -3e38, 3e38, -1.0], torch.float32, config_of(loss=loss, kl=0.1))


# Ordinary log-probs, and anything that float32 can hold.
LOGPROBS = st.one_of(st.floats(-50, 0), st.floats(width=32, allow_nan=False, allow_infinity=False))
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS | st.just(-math.inf)), max_size=10)


@given(
    pairs=PAIRS,
    choice=st.sampled_from(COMBINATIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    dual_clip=st.sampled_from([None, 3.0]),
    discount=st.sampled_from([1.0, 0.5]),
)
def test_no_finite_input_gives_nan_or_infinity(pairs, choice, dtype, dual_clip, discount):
    config = config_of(choice, dual_clip=dual_clip, discount=discount, weight_gamma=0.5, kl=0.1)
    finite_loss([pair[0] for pair in pairs], [pair[1] for pair in pairs], dtype, config)
