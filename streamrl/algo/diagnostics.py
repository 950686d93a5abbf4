"""What a step's tokens looked like: sums that add up over micro batches and ranks, and the metrics they make.

    per-token values ──bucket_sums──▶ sums [buckets] ──merge──▶ sums of a pass, of all passes ──finish──▶ metrics

A sum is a float64 tensor with one entry a staleness bucket. All are added, except keys `max/...`, of
which the largest counts: over micro batches (`merge`) and over ranks (all_reduce with SUM or MAX).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from streamrl.algo.families.base import CLIPPED
from streamrl.algo.importance import Weights
from streamrl.algo.ratios import bounded

# Staleness in learner steps, doubling in width: the suffix of a metric that one bucket has.
BUCKETS = ("s0", "s1", "s2", "s3_4", "s5_8", "s9+")

_LAST_OF_BUCKET = (0, 1, 2, 4, 8)

# Prefix of a sum that is the largest of its parts, not their sum.
MAX = "max/"

# Prefix of a value that says which tokens a regulariser penalises.
PENALISED_BY = "penalised_by/"

# What a penalty in the reward has taken off a token's share.
REWARD_KL = "reward_kl"

_MASKED_BY = "masked_by/"
_LOSS_SHARES = (*CLIPPED, "entropy", "ratio_penalty")  # means over n tokens, under `loss/`


def off_policy_values(log_rho: Tensor) -> dict[str, Tensor]:
    """Per-token values of how far n tokens are off-policy, from rho = sg(pi) / mu itself.

    log_rho: float [n], before any weight, clip or mask. What is squared or put under exp is clamped to
    +-20; the mean and the largest |log rho| are of the difference itself, so that a saturated clamp shows.
    """
    log_rho = log_rho.double()
    clamped = bounded(log_rho)
    rho = clamped.exp()
    return {
        "rho": rho,
        "rho_squared": rho.square(),
        "kl_k1": -clamped,
        "kl_k3": rho - 1 - clamped,
        "log_ratio": log_rho.abs(),
        MAX + "log_ratio": log_rho.abs(),
    }


def weight_values(applied: Weights) -> dict[str, Tensor]:
    """Per-token values of what was applied to n tokens."""
    weight = applied.weight.double()
    rules = {_MASKED_BY + rule: masked for rule, masked in applied.masked_by.items()}
    return {"weight": weight, "weight_squared": weight.square(), "masked": applied.masked, **rules}


def bucket_sums(values: Mapping[str, Tensor], staleness: Tensor) -> dict[str, Tensor]:
    """Each value summed (`max/...`: its largest) over the tokens of every staleness bucket: float64 [6].

    values: [n] each, of any dtype, without gradient, >= 0 under `max/`; staleness: int64 [n], learner steps.
    """
    bucket = torch.bucketize(staleness, torch.tensor(_LAST_OF_BUCKET, device=staleness.device))
    sums = {}
    for key, value in values.items():
        zero = torch.zeros(len(BUCKETS), dtype=torch.float64, device=staleness.device)
        if key.startswith(MAX):
            sums[key] = zero.scatter_reduce(0, bucket, value.double(), reduce="amax")
        else:
            sums[key] = zero.index_add(0, bucket, value.double())
    return sums


def merge(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of several micro batches as one. Raises ValueError when their keys differ."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        if merged and merged.keys() != part.keys():
            raise ValueError(f"sums with different keys: {sorted(merged.keys() ^ part.keys())}")
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            else:
                merged[key] = torch.maximum(merged[key], value) if key.startswith(MAX) else merged[key] + value
    return merged


def finish(
    first: Mapping[str, Tensor], every: Mapping[str, Tensor] | None = None, updates: int = 1
) -> dict[str, float]:
    """The metrics of one learner step from the sums of its micro batches and ranks.

    first: sums of the first pass over the batch, all its mini batches merged; every: those of all passes (None:
    there was one); updates: passes x mini batches. How far off-policy the data is, is measured in the first pass,
    `offpolicy/` and `tokens/`; what was applied is measured in all of them, `loss/` and `weights/`.

    A name alone is over all tokens; `NAME/s0`, `/s1`, `/s2`, `/s3_4`, `/s5_8`, `/s9+` are over the tokens of
    that staleness and are there only when the bucket has trained tokens. n counts the trained tokens whose
    mu is finite, once a pass. With n = 0 nothing is measured: of all these only `loss/total` and `tokens/` are there.

    - `loss/total`: the loss that was minimised, all terms, mean over the updates; a bucket has its part, the
      parts add up to it.
    - `loss/kl`: mean KL(pi || pi_ref) by `algo.kl_estimator`, 0 without a reference policy. Not `offpolicy/kl`: to
      mu.
    - `reward/kl`: mean of what `algo.kl_reward` multiplies and takes off the reward; absent without it.
    - `distillation/kl`: mean of log pi - log pi_T (k1); absent without a teacher.
    - `loss/entropy`: mean entropy of pi, nats, the term itself without its weight; absent if not measured.
    - `loss/clip_low`, `/clip_high`, `/clip_dual`: share of n with r < 1 - eps_low and A < 0, with
      r > 1 + eps_high and A > 0, with the dual clip's bound active; r of the sample in gspo, and whatever the
      sign of A in cispo.
    - `loss/ratio_penalty`: mean (log r)^2, without its weight; absent without `algo.ratio_penalty`.
    - `loss/kl_cov`: share of n that has the penalty of `covariance: kl_cov`; absent without it.
    - `offpolicy/ess`: effective sample size (sum rho)^2 / (n sum rho^2), in (0, 1].
    - `offpolicy/kl`, `/kl_k1`: KL(mu || pi) by k3 = rho - 1 - log rho and by k1 = -log rho, nats a token.
    - `offpolicy/log_ratio_mean`, `/log_ratio_max`: |log rho|.
    - `weights/ess`: the effective sample size of w; `weights/masked`, `weights/masked_RULE`: share of n.
    - `tokens/trained`: tokens in the denominator; `tokens/dropped`: those of them whose mu is not finite.
    """
    data, applied = _rows(first), _rows(first if every is None else every)
    metrics = _data_metrics(_over_buckets(data)) | _applied_metrics(_over_buckets(applied), updates)
    for index, bucket in enumerate(BUCKETS):
        column = {key: row[index] for key, row in data.items()}
        if column["trained"] > 0:
            inside = _data_metrics(column)
            inside |= _applied_metrics({key: row[index] for key, row in applied.items()}, updates)
            metrics |= {f"{name}/{bucket}": value for name, value in inside.items()}
    return metrics


def before_updates(mini_batches: Iterable[Mapping[str, Tensor]], stops: Iterable[str]) -> dict[str, float]:
    """What the age of the data alone does, before any update of the step.

    mini_batches: the sums of each, in order; the first that has tokens is read, since one without makes no update.
    stops: of CLIPPED, those that take a token's gradient (`Family.stops`).

    `offpolicy/clipped`, `offpolicy/masked`: shares of n that the clip takes the gradient of, and that a mask zeroes;
    nothing where n is 0. `loss/clip_*` and `weights/masked` also have what later updates of the step did.
    """
    for sums in mini_batches:
        total = _over_buckets(_rows(sums))
        if n := total["measured"]:
            clipped = sum(total.get(name, 0.0) for name in stops)
            return {"offpolicy/clipped": clipped / n, "offpolicy/masked": total["masked"] / n}
    return {}


def _rows(sums: Mapping[str, Tensor]) -> dict[str, list[float]]:
    table = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, table, strict=True))


def _over_buckets(rows: Mapping[str, list[float]]) -> dict[str, float]:
    return {key: max(row) if key.startswith(MAX) else sum(row) for key, row in rows.items()}


def _data_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """How far off-policy the data is, from the first pass."""
    counts = {"tokens/trained": total["trained"], "tokens/dropped": total["dropped"]}
    n = total["measured"]
    if not n:
        return counts
    metrics = {
        "offpolicy/ess": _effective_sample_size(total["rho"], total["rho_squared"], n),
        "offpolicy/kl": total["kl_k3"] / n,
        "offpolicy/kl_k1": total["kl_k1"] / n,
        "offpolicy/log_ratio_mean": total["log_ratio"] / n,
        "offpolicy/log_ratio_max": total[MAX + "log_ratio"],
    }
    return counts | metrics | ({"reward/kl": total[REWARD_KL] / n} if REWARD_KL in total else {})


def _applied_metrics(total: Mapping[str, float], updates: int) -> dict[str, float]:
    """What was done to it, over all passes."""
    loss = {"loss/total": total["loss"] / updates}
    n = total["measured"]
    if not n:
        return loss
    metrics = {
        "loss/kl": total.get("kl", 0.0) / n,
        "weights/ess": _effective_sample_size(total["weight"], total["weight_squared"], n),
    }
    names = {"masked": "weights/masked", "distillation_kl": "distillation/kl"}
    names |= {name: f"loss/{name}" for name in _LOSS_SHARES}
    names |= {key: f"weights/masked_{key.removeprefix(_MASKED_BY)}" for key in total if key.startswith(_MASKED_BY)}
    names |= {key: f"loss/{key.removeprefix(PENALISED_BY)}" for key in total if key.startswith(PENALISED_BY)}
    return loss | metrics | {name: total[key] / n for key, name in names.items() if key in total}


def _effective_sample_size(total: float, squares: float, count: float) -> float:
    """Of `count` weights, by their sum and that of their squares; 0 where all of them are 0."""
    return 0.0 if squares == 0 else total * total / (count * squares)
