"""The metrics against loops over tokens, in total and by staleness bucket."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.diagnostics import BUCKETS, before_updates, bucket_sums, finish, merge
from streamrl.algo.families import family_of
from streamrl.algo.losses import policy_loss
from streamrl.choices import LOSSES
from streamrl.config.algo import AlgoConfig

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


@pytest.mark.parametrize("name", LOSSES.names)
def test_clipped_before_the_updates_are_the_tokens_whose_gradient_the_loss_takes(token_batch, name):
    lengths = (40, 30, 50, 20)
    batch = token_batch(3, lengths=lengths, mask=torch.ones(sum(lengths), dtype=torch.bool))
    batch.advantages[::7] = 0
    keys = {"dual_clip": 1.5, "eps_low": 0.05, "eps_high": 0.05, "ratio_cap": 1.2}
    uses = LOSSES.load(name).uses
    config = AlgoConfig(loss=name, weight="none", **{key: keys[key] for key in keys.keys() & uses})
    loss, sums = policy_loss(batch, config, Denominators(140, batch.samples))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    lost = (gradient == 0) & (batch.advantages != 0)
    share = float(lost.double().mean())
    assert before_updates([sums], family_of(config).stops)["offpolicy/clipped"] == pytest.approx(share)
    assert bool(lost.any()) == (name in ("clip", "gspo", "gmpo", "dppo_tv", "dppo_kl"))


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


def test_the_rules_of_the_step_are_counted_under_their_own_names(token_batch):
    batch = token_batch(0, mask=torch.ones(31, dtype=torch.bool))
    settings = AlgoConfig(proximal="recompute", mask="second_moment", covariance="clip_cov")
    result = metrics_of(batch, settings)
    share = {name: getattr(batch, name).double().mean().item() for name in ("outliers", "covariant")}
    assert result["weights/masked_second_moment"] == pytest.approx(share["outliers"])
    assert result["weights/masked_clip_cov"] == pytest.approx(share["covariant"])
    assert result["weights/masked"] == pytest.approx((batch.outliers | batch.covariant).double().mean().item())
    penalised = metrics_of(batch, AlgoConfig(covariance="kl_cov"))
    assert penalised["loss/kl_cov"] == pytest.approx(share["covariant"])
    assert penalised["weights/masked"] == 0


def test_the_kl_to_the_reference_is_the_mean_of_k3_and_not_that_to_mu(token_batch):
    batch = token_batch(3)
    difference = (batch.reference - batch.logprobs.detach())[batch.mask]
    expected = (difference.exp() - 1 - difference).mean().item()
    assert metrics_of(batch, AlgoConfig(kl=0.2))["loss/kl"] == pytest.approx(expected)
    assert metrics_of(batch, AlgoConfig())["loss/kl"] == 0


def test_over_several_passes_the_first_tells_how_old_the_data_is_and_all_of_them_what_was_applied(token_batch):
    """Two passes of two mini batches: the second pass has moved away from mu."""
    parts = [token_batch(seed, lengths=(20, 15)) for seed in (1, 2)]
    moved = [dataclasses.replace(part, logprobs=part.logprobs.detach() + 0.4) for part in parts]
    first, second = (
        merge(policy_loss(part, CONFIG, Denominators(int(part.mask.sum()), 2))[1] for part in pass_)
        for pass_ in (parts, moved)
    )
    alone, later = finish(first, updates=2), finish(second, updates=2)
    both = finish(first, merge([first, second]), updates=4)
    for name, value in both.items():
        if name.startswith(("offpolicy/", "tokens/")):
            assert value == alone[name], name
        elif "ess" not in name:
            assert value == pytest.approx((alone[name] + later[name]) / 2), name
    weights = torch.cat([_weights(part) for part in (*parts, *moved)])
    assert both["weights/ess"] == pytest.approx(effective_sample_size(weights.tolist()))
    assert both["loss/clip_high"] > alone["loss/clip_high"]


def _weights(batch) -> torch.Tensor:
    """w of every trained token under CONFIG."""
    rho = (batch.logprobs - batch.behaviour).detach().exp()[batch.mask]
    kept = (rho >= 0.5) & (rho <= 5)
    return kept * rho.clamp(max=1.2) / rho * 0.9 ** batch.staleness[batch.mask]


def test_the_loss_of_a_step_is_the_mean_over_its_updates(token_batch):
    parts = [token_batch(seed) for seed in (1, 2)]
    losses, sums = zip(
        *(policy_loss(part, CONFIG, Denominators(int(part.mask.sum()), 6)) for part in parts), strict=True
    )
    result = finish(merge(sums), updates=2)
    assert result["loss/total"] == pytest.approx(sum(loss.item() for loss in losses) / 2)
    assert sum(result.get(f"loss/total/{bucket}", 0.0) for bucket in BUCKETS) == pytest.approx(result["loss/total"])


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


def test_what_has_no_token_measures_nothing(token_batch):
    batch = token_batch(0)
    nothing = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    dropped = dataclasses.replace(batch, behaviour=torch.full_like(batch.behaviour, -math.inf))
    for empty, trained in ((nothing, 0), (dropped, int(batch.mask.sum()))):
        counts = {"loss/total": 0.0, "tokens/trained": trained, "tokens/dropped": trained}
        assert {name: value for name, value in metrics_of(empty).items() if name.count("/") == 1} == counts
        assert {name.rpartition("/")[0] for name in metrics_of(empty)} - {"loss", "tokens"} <= counts.keys()


def test_what_the_age_of_the_data_does_is_read_of_the_first_mini_batch_that_has_tokens(token_batch):
    first, second = token_batch(1, spread=0.7), token_batch(2, spread=0.1)
    nothing = dataclasses.replace(first, mask=torch.zeros_like(first.mask))
    empty, old, young = (
        policy_loss(each, CONFIG, Denominators(int(first.mask.sum()), first.samples))[1]
        for each in (nothing, first, second)
    )
    stops = family_of(CONFIG).stops
    assert before_updates([empty], stops) == {}
    assert before_updates([empty, old, young], stops) == before_updates([old], stops) != before_updates([young], stops)


def test_a_policy_that_is_nan_has_no_effective_sample_size_of_0(token_batch):
    batch = token_batch(0, mask=torch.ones(31, dtype=torch.bool))
    with torch.no_grad():
        batch.logprobs[3] = math.nan
    assert math.isnan(metrics_of(batch)["offpolicy/ess"])
