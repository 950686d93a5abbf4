"""The policy loss against a loop that reads like the equations, and the invariants it has to keep."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algo.diagnostics import finish, merge
from streamrl.algo.importance import MASK_EDGES
from streamrl.algo.losses import Denominators, TokenBatch, clipped_surrogate, policy_loss
from streamrl.config_learner import AlgoConfig

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_norm")
PIPELINES = list(
    itertools.product(("behaviour", "interpolate"), ("none", "token", "sequence"), ("none", *MASK_EDGES), AGGREGATIONS)
)


def config_of(proximal="behaviour", weight="token", mask="none", aggregation="token_mean", **keys) -> AlgoConfig:
    wide = {} if mask != "geometric" else {"mask_low": 0.8, "mask_high": 1.2}
    keys = {"norm_length": 20} | wide | keys
    return AlgoConfig(proximal=proximal, weight=weight, mask=mask, aggregation=aggregation, **keys)


def denominators_of(*batches: TokenBatch) -> Denominators:
    return Denominators.of(batch.mask[batch.sample == sample] for batch in batches for sample in range(batch.samples))


def loss_and_gradient(batch: TokenBatch, config: AlgoConfig, denominators: Denominators | None = None):
    loss, sums = policy_loss(batch, config, denominators or denominators_of(batch))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return loss.detach(), gradient, sums


def clamped_exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def slow_weight(t: int, kept: list[int], log_correction: dict[int, float], batch: TokenBatch, c: AlgoConfig) -> float:
    siblings = [u for u in kept if batch.sample[u] == batch.sample[t]]
    product = clamped_exp(sum(log_correction[u] for u in siblings))
    q = {"token": clamped_exp(log_correction[t]), "sequence": product}
    q["geometric"] = clamped_exp(sum(log_correction[u] for u in siblings) / len(siblings))
    age = int(batch.staleness[t])
    weight = 1.0
    if c.weight != "none":
        s = age if c.weight == "token" else max(int(batch.staleness[u]) for u in siblings)
        f = min(q[c.weight], 1 + (c.weight_cap - 1) * c.weight_gamma**s)
        weight = f / q[c.weight] if c.proximal == "behaviour" else f
    if c.mask != "none":
        default = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}[c.mask]
        low = default[0] if c.mask_low is None else c.mask_low
        high = default[1] if c.mask_high is None else c.mask_high
        weight = weight if low <= q[c.mask] <= high else 0.0
    return weight * c.discount**age


def slow_loss(batch: TokenBatch, c: AlgoConfig, denominators: Denominators) -> torch.Tensor:
    """The equations of docs/algorithm.md, one token at a time; only logprobs and entropy carry gradient."""
    trained = [t for t in range(len(batch.mask)) if batch.mask[t]]
    kept = [t for t in trained if math.isfinite(batch.behaviour[t])]
    log_rho = {t: batch.logprobs[t].item() - batch.behaviour[t].item() for t in kept}
    alpha = {
        t: 0.0 if c.proximal == "behaviour" else batch.staleness[t].item() / (batch.staleness[t].item() + 1)
        for t in kept
    }
    log_correction = log_rho if c.proximal == "behaviour" else {t: alpha[t] * log_rho[t] for t in kept}
    total = torch.zeros((), dtype=torch.float64)
    for t in kept:
        w = slow_weight(t, kept, log_correction, batch, c)
        pi_old = batch.behaviour[t].item() + alpha[t] * log_rho[t]
        r = torch.exp(torch.clamp(batch.logprobs[t] - pi_old, -20, 20))
        a = batch.advantages[t].item()
        surrogate = min(r * a, torch.clamp(r, 1 - c.eps_low, 1 + c.eps_high) * a)
        if c.dual_clip is not None and a < 0 and surrogate < c.dual_clip * a:
            surrogate = torch.tensor(c.dual_clip * a, dtype=torch.float64)
        loss = -w * surrogate
        if batch.entropy is not None:
            loss = loss - c.entropy * batch.entropy[t]
        length = sum(1 for u in trained if batch.sample[u] == batch.sample[t])
        total = (
            total
            + loss
            / {
                "token_mean": denominators.tokens,
                "sequence_mean": denominators.samples * length,
                "sequence_sum_norm": denominators.samples * (c.norm_length or 0),
            }[c.aggregation]
        )
    return total


@pytest.mark.parametrize(("proximal", "weight", "mask", "aggregation"), PIPELINES)
def test_value_and_gradients_equal_the_loop(token_batch, proximal, weight, mask, aggregation):
    batch = token_batch(3, spread=0.6)
    batch.behaviour[torch.tensor([2, 9])] = -math.inf
    keys = {"weight_cap": 1.5, "weight_gamma": 0.8, "discount": 0.9, "entropy": 0.01, "dual_clip": 1.6}
    config = config_of(proximal, weight, mask, aggregation, **keys)
    denominators = Denominators(tokens=50, samples=9)
    loss, _ = policy_loss(batch, config, denominators)
    expected = slow_loss(batch, config, denominators)
    leaves = (batch.logprobs, batch.entropy)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for fast, slow in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weight", ["none", "token", "sequence"])
@pytest.mark.parametrize("proximal", ["behaviour", "interpolate"])
def test_on_policy_the_gradient_is_that_of_reinforce_with_a_baseline(token_batch, proximal, weight, aggregation):
    batch = token_batch(1, spread=0.0)
    config = config_of(proximal, weight, "geometric", aggregation)
    _, gradient, _ = loss_and_gradient(batch, config)
    per_token = torch.where(batch.mask, batch.advantages * batch.logprobs, 0.0)
    rows = [(per_token[batch.sample == i], batch.mask[batch.sample == i].sum()) for i in range(batch.samples)]
    reinforce = {
        "token_mean": -per_token.sum() / batch.mask.sum(),
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_and_dropped_tokens_stay_in_the_denominator_and_untrained_ones_are_not_in_it(token_batch, aggregation):
    trained = torch.tensor([True, True, True, False, True, True])
    batch = token_batch(0, lengths=(4, 2), mask=trained, spread=0.0)
    batch.behaviour[0] = -math.inf  # dropped
    batch.behaviour[4] -= 3.0  # rho = e^3 is outside the mask's 0.5..5
    _, gradient, sums = loss_and_gradient(batch, config_of(mask="token", aggregation=aggregation))
    share = {"token_mean": [1 / 5] * 6, "sequence_mean": [1 / 6] * 4 + [1 / 4] * 2, "sequence_sum_norm": [1 / 40] * 6}
    expected = [-batch.advantages[t].item() * share[aggregation][t] if t in (1, 2, 5) else 0.0 for t in range(6)]
    assert gradient.tolist() == pytest.approx(expected)
    metrics = finish(sums)
    assert (metrics["tokens/trained"], metrics["tokens/dropped"], metrics["weights/masked"]) == (5, 1, 0.25)


def test_denominators_count_trained_tokens_and_the_samples_that_have_any():
    masks = [np.array([True, True, False]), torch.tensor([False, False]), torch.tensor([], dtype=torch.bool)]
    assert Denominators.of(masks) == Denominators(tokens=2, samples=1)


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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_whatever_an_untrained_token_holds_changes_nothing(token_batch, aggregation):
    config = config_of("interpolate", "sequence", "geometric", aggregation, entropy=0.1)
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [(3, 2), ()])
def test_a_batch_without_a_trained_token_gives_zero_and_zero_gradients(token_batch, aggregation, lengths):
    batch = token_batch(0, lengths=lengths, mask=torch.zeros(sum(lengths), dtype=torch.bool))
    config = config_of("interpolate", "sequence", "geometric", aggregation, entropy=0.1)
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
    for proximal, weight, mask, aggregation in PIPELINES:
        with torch.device("meta"):  # a tensor made without a device would not mix with the batch's
            _, sums = policy_loss(batch, config_of(proximal, weight, mask, aggregation), denominators)
        assert {value.device.type for value in sums.values()} == {"cpu"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", torch.zeros(31, dtype=torch.bfloat16), "logprobs is torch.bfloat16"),
        ("behaviour", torch.zeros(31, dtype=torch.float32), "behaviour is torch.float32"),
        ("staleness", torch.zeros(30, dtype=torch.int64), r"staleness is torch.int64 \[30\]"),
        ("mask", torch.zeros(31), "mask is torch.float32"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(token_batch, field, value, message):
    with pytest.raises(ValueError, match=message):
        token_batch(0, **{field: value})


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


@pytest.mark.parametrize(("proximal", "weight", "mask", "aggregation"), PIPELINES)
def test_neither_order_nor_micro_batches_nor_packing_change_loss_gradient_or_metrics(
    token_batch, proximal, weight, mask, aggregation
):
    batch = token_batch(7)
    batch.behaviour[4] = -math.inf
    config = config_of(proximal, weight, mask, aggregation, discount=0.9, entropy=0.01)
    loss, gradient, sums = loss_and_gradient(batch, config)
    metrics = finish(sums)

    shuffled = batch.select(torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(1)))
    for parts in ([shuffled], [only(batch, [4, 0]), only(batch, [2]), only(batch, [5, 1, 3])]):
        results = [policy_loss(part, config, denominators_of(batch)) for part in parts]
        total = torch.stack([part_loss for part_loss, _ in results]).sum()
        other = finish(merge(part_sums for _, part_sums in results))
        assert total.item() == pytest.approx(loss.item(), abs=1e-12)
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
    )
    loss, gradient, sums = loss_and_gradient(batch, config)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in finish(sums).values())


# Ordinary log-probs, and anything that float32 can hold.
LOGPROBS = st.one_of(st.floats(-50, 0), st.floats(width=32, allow_nan=False, allow_infinity=False))
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS | st.just(-math.inf)), max_size=10)


@settings(max_examples=300, deadline=None)
@given(
    pairs=PAIRS,
    choice=st.sampled_from(PIPELINES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    dual_clip=st.sampled_from([None, 3.0]),
    discount=st.sampled_from([1.0, 0.5]),
)
def test_no_finite_input_gives_nan_or_infinity(pairs, choice, dtype, dual_clip, discount):
    config = config_of(*choice, dual_clip=dual_clip, discount=discount, weight_gamma=0.5)
    finite_loss([pair[0] for pair in pairs], [pair[1] for pair in pairs], dtype, config)
