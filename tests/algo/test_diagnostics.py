"""The metrics against loops over tokens, in total and by staleness bucket."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.algo.diagnostics import BUCKETS, bucket_sums, finish, merge
from streamrl.algo.losses import Denominators, policy_loss
from streamrl.config_learner import AlgoConfig

CONFIG = AlgoConfig(weight_cap=1.2, mask="token", discount=0.9, entropy=0.02, dual_clip=1.5)
LOWEST = {"s0": 0, "s1": 1, "s2": 2, "s3_4": 3, "s5_8": 5, "s9+": 9}
HIGHEST = {"s0": 0, "s1": 1, "s2": 2, "s3_4": 4, "s5_8": 8, "s9+": 10**9}


def effective_sample_size(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


def slow_metrics(batch, tokens: list[int]) -> dict[str, float]:
    """What `finish` says of the given trained tokens under CONFIG and `proximal: behaviour`."""
    kept = [t for t in tokens if math.isfinite(batch.behaviour[t])]
    log_rho = [batch.logprobs[t].item() - batch.behaviour[t].item() for t in kept]
    rho = [math.exp(value) for value in log_rho]
    advantage = [batch.advantages[t].item() for t in kept]
    masked = [value < 0.5 or value > 5 for value in rho]
    discount = [0.9 ** batch.staleness[t].item() for t in kept]
    weight = [0.0 if m else min(r, 1.2) / r * d for r, m, d in zip(rho, masked, discount, strict=True)]
    loss, low, high, dual = 0.0, 0, 0, 0
    for t, r, a, w in zip(kept, rho, advantage, weight, strict=True):
        surrogate = min(r * a, min(max(r, 0.8), 1.28) * a)
        bounded = max(surrogate, 1.5 * a) if a < 0 else surrogate
        loss += (-w * bounded - 0.02 * batch.entropy[t].item()) / batch.mask.sum().item()
        low, high, dual = low + (r < 0.8 and a < 0), high + (r > 1.28 and a > 0), dual + (bounded != surrogate)
    n = len(kept)
    return {
        "loss/total": loss,
        "loss/kl": 0.0,
        "loss/entropy": sum(batch.entropy[t].item() for t in kept) / n,
        "loss/clip_low": low / n,
        "loss/clip_high": high / n,
        "loss/clip_dual": dual / n,
        "offpolicy/ess": effective_sample_size(rho),
        "offpolicy/kl": sum(r - 1 - x for r, x in zip(rho, log_rho, strict=True)) / n,
        "offpolicy/kl_k1": -sum(log_rho) / n,
        "offpolicy/log_ratio_mean": sum(abs(value) for value in log_rho) / n,
        "offpolicy/log_ratio_max": max(abs(value) for value in log_rho),
        "weights/ess": effective_sample_size(weight),
        "weights/masked": sum(masked) / n,
        "weights/masked_token": sum(masked) / n,
        "tokens/trained": len(tokens),
        "tokens/dropped": len(tokens) - n,
    }


def metrics_of(batch, config=CONFIG):
    return finish(policy_loss(batch, config, Denominators(int(batch.mask.sum()), batch.samples))[1])


def test_every_metric_equals_the_loop_in_total_and_in_every_bucket(token_batch):
    batch = token_batch(11, lengths=(40, 30, 50, 20), spread=0.7)
    batch.behaviour[torch.tensor([3, 50, 51])] = -math.inf
    trained = [t for t in range(140) if batch.mask[t]]
    expected = slow_metrics(batch, trained)
    for bucket in BUCKETS:
        inside = [t for t in trained if LOWEST[bucket] <= batch.staleness[t] <= HIGHEST[bucket]]
        expected |= {f"{name}/{bucket}": value for name, value in slow_metrics(batch, inside).items()}
    result = metrics_of(batch)
    assert all(result[name] > 0 for name in ("loss/clip_low", "loss/clip_high", "loss/clip_dual", "weights/masked"))
    assert result == pytest.approx(expected, abs=1e-12)


def test_the_metrics_of_the_run_folder_that_belong_here_are_all_there(token_batch):
    names = (
        "loss/total loss/kl loss/entropy loss/clip_low loss/clip_high offpolicy/ess offpolicy/kl "
        "offpolicy/log_ratio_max weights/ess weights/masked tokens/trained"
    )
    assert set(names.split()) <= metrics_of(token_batch(0), AlgoConfig()).keys()


def test_the_parts_of_the_loss_by_bucket_add_up_to_the_loss(token_batch):
    batch = token_batch(2)
    result = metrics_of(batch)
    parts = [result.get(f"loss/total/{bucket}", 0.0) for bucket in BUCKETS]
    loss = policy_loss(batch, CONFIG, Denominators(int(batch.mask.sum()), batch.samples))[0]
    assert sum(parts) == pytest.approx(result["loss/total"])
    assert result["loss/total"] == pytest.approx(loss.item())


def test_a_bucket_without_tokens_has_no_metrics(token_batch):
    batch = token_batch(0, staleness=torch.full((31,), 4))
    suffixes = {name.rsplit("/", 1)[1] for name in metrics_of(batch)} & set(BUCKETS)
    assert suffixes == {"s3_4"}


def test_staleness_falls_into_its_bucket():
    staleness = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 1000])
    sums = bucket_sums({"count": torch.ones(9), "max/age": staleness}, staleness)
    assert sums["count"].tolist() == [1, 1, 1, 2, 2, 2]
    assert sums["max/age"].tolist() == [0, 1, 2, 4, 8, 1000]


def test_on_policy_data_has_effective_sample_size_one_and_no_divergence(token_batch):
    result = metrics_of(token_batch(0, spread=0.0), AlgoConfig())
    assert (result["offpolicy/ess"], result["weights/ess"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (result["offpolicy/kl"], result["offpolicy/kl_k1"], result["offpolicy/log_ratio_max"]) == (0, 0, 0)


def test_off_policy_metrics_do_not_depend_on_what_is_applied(token_batch):
    batch = token_batch(4, spread=1.0)
    applied = AlgoConfig(proximal="interpolate", weight="sequence", mask="geometric", discount=0.5)
    plain, other = metrics_of(batch, AlgoConfig(weight="none")), metrics_of(batch, applied)
    names = [name for name in plain if name.startswith("offpolicy/")]
    assert len(names) > 5
    assert {name: plain[name] for name in names} == {name: other[name] for name in names}
    assert plain["weights/ess"] != other["weights/ess"]


def test_the_largest_log_ratio_is_not_clamped(token_batch):
    batch = token_batch(0, mask=torch.ones(31, dtype=torch.bool))
    batch.behaviour[0] = batch.logprobs[0].detach() - 35
    assert metrics_of(batch)["offpolicy/log_ratio_max"] == pytest.approx(35)


def test_each_mask_is_counted_under_its_own_name(token_batch):
    for rule in ("token", "sequence", "geometric"):
        result = metrics_of(token_batch(0), AlgoConfig(mask=rule))
        assert result[f"weights/masked_{rule}"] == result["weights/masked"]
    assert not any(name.startswith("weights/masked_") for name in metrics_of(token_batch(0), AlgoConfig()))


def test_merge_adds_and_takes_the_largest_where_the_key_says_so():
    parts = [{"n": torch.tensor([1.0, 2.0]), "max/x": torch.tensor([5.0, 1.0])} for _ in range(2)]
    parts[1]["max/x"] = torch.tensor([3.0, 4.0])
    merged = merge(parts)
    assert merged["n"].tolist() == [2.0, 4.0]
    assert merged["max/x"].tolist() == [5.0, 4.0]
    assert parts[0]["n"].tolist() == [1.0, 2.0]


def test_sums_of_different_settings_are_not_merged():
    with pytest.raises(ValueError, match=r"\['y'\]"):
        merge([{"x": torch.zeros(6)}, {"x": torch.zeros(6), "y": torch.zeros(6)}])
