"""Every loss, weight, mask and aggregation against an independent float64 reference, and against TRL where it has it.

    python -m benchmarks.losses [--quick] [--json PATH]

A row is one setting of `algo`, with numbers that float32 would round. `value` and `gradient` are the largest
differences to the reference (a loop over tokens that reads like the equations, `losses_reference.py`; or TRL's
`GRPOTrainer._compute_loss`), over the seeds, relative to the reference's value and largest entry; gradients are those
by log-prob, by entropy and by the divergence over the whole vocabulary. `float32` is the gradient of the same tokens in
the dtype of training. The branches are those that the setting has, each with the number of tokens that took it: a
comparison that misses one proves nothing about it, and fails. The row before the last is that divergence from logits.
The last row is every combination of family, proximal policy, weight, mask, aggregation and covariance rule on small
batches.

Exit code 1 when a difference is above the bar or a branch was never taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.losses_critic import compared
from benchmarks.losses_full_kl import full_kl_differences
from benchmarks.losses_reference import (
    slow_covariant,
    slow_loss,
    slow_mean_weight,
    slow_outliers,
)
from benchmarks.losses_rewards import slow_penalised_advantages
from benchmarks.losses_trl import NORM_LENGTH, TRL_LOSS, rectangular, token_batch, trl_loss
from benchmarks.random_models import worst
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.importance import weight_sums
from streamrl.algo.losses import policy_loss
from streamrl.algo.reward_penalty import Outcomes, penalised_advantages, reward_kl
from streamrl.algo.tokens import TokenBatch
from streamrl.algo.whole_step import StepTokens, select
from streamrl.choices import AGGREGATIONS, BASELINES, DIVERGENCES, LOSSES, PROXIMALS, REWARD_DIVERGENCES
from streamrl.config.algo import AdvantageConfig, AlgoConfig
from streamrl.lab.output import output_file

BAR = 1e-9
GROUP = 4  # answers of one, for what depends on it
STEP = 5  # seeds the draw of clip_cov
SMALL_CLIP = {"eps_low": 0.03, "eps_high": 0.05}  # a sample's ratio moves less than a token's
DPPO = {"eps_low": 0.05, "eps_high": 0.06, "ratio_cap": 1.3}  # of a divergence, not of a ratio
COVARIANCE = {"covariance_share": 0.1, "covariance_low": 0.1, "covariance_high": 0.9, "covariance_kl": 0.7}
TEACHER = "teacher"  # any name will do: its log-probs are drawn
WIDE = {"mask_low": 0.9, "mask_high": 1.15}
# Of the masks by a divergence: about half of the tokens are further away.
LIMITS = {
    "token_k2": 0.1,
    "token_k3": 0.1,
    "sequence_sum_k2": 2.0,
    "sequence_sum_k3": 2.0,
    "sequence_mean_k2": 0.12,
    "sequence_mean_k3": 0.12,
    "sequence_max_k2": 0.6,
    "sequence_max_k3": 0.6,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "loss=clip": {},
    "loss=clip dual_clip": {"dual_clip": 1.5, "weight": "none"},
    "loss=cispo": {"loss": "cispo"},
    "loss=gspo": {"loss": "gspo", **SMALL_CLIP},
    "loss=gspo dual_clip": {"loss": "gspo", "dual_clip": 1.06, **SMALL_CLIP},
    "loss=gmpo": {"loss": "gmpo", "aggregation": "sequence_mean"},
    "loss=sapo": {"loss": "sapo", "sapo_positive": 0.9},
    "loss=reinforce": {"loss": "reinforce"},
    "loss=reinforce weight=none": {"loss": "reinforce", "weight": "none"},
    "loss=gpg": {"loss": "gpg"},
    "loss=dro": {"loss": "dro", "dro_temperature": 0.6},
    "loss=dppo_tv": {"loss": "dppo_tv", **DPPO},
    "loss=dppo_kl": {"loss": "dppo_kl", **DPPO},
    "ratio_penalty": {"loss": "dppo_tv", "ratio_penalty": 1e-2, **DPPO},
    "proximal=recompute": {"proximal": "recompute"},
    "proximal=interpolate": {"proximal": "interpolate", "weight_cap": 1.4},
    "proximal=interpolate_previous": {"proximal": "interpolate_previous", "weight_cap": 1.4},
    "weight=none": {"weight": "none"},
    "weight=sequence": {"weight": "sequence"},
    "weight=sequence recompute": {"weight": "sequence", "proximal": "recompute"},
    "weight_gamma": {"weight_gamma": 0.5},
    "mask=token": {"mask": "token"},
    "mask=sequence": {"mask": "sequence"},
    "mask=geometric": {"mask": "geometric", **WIDE},
    "mask=second_moment": {"mask": "second_moment", "proximal": "recompute"},
    **{f"mask={mask}": {"mask": mask, "mask_high": high} for mask, high in LIMITS.items()},
    "more_masks": {
        "mask": "token",
        "more_masks": [
            {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.15},
            {"mask": "token_k2", "mask_high": 0.2},
            {"mask": "sequence_max_k3", "mask_high": 1.5},
        ],
    },
    "weight_normalise": {"weight_normalise": True, "proximal": "recompute"},
    "weight_normalise sequence": {"weight_normalise": True, "proximal": "recompute", "weight": "sequence"},
    "covariance=clip_cov": {"covariance": "clip_cov", **COVARIANCE},
    "covariance=kl_cov": {"covariance": "kl_cov", **COVARIANCE},
    "discount": {"discount": 0.8},
    **{f"kl {name}": {"kl": 0.1, "kl_estimator": name} for name in DIVERGENCES.names},
    **{
        f"kl {name} straight through": {"kl": 0.1, "kl_estimator": name, "kl_straight_through": True}
        for name in DIVERGENCES.names
        if not DIVERGENCES.load(name).follows_k2
    },
    **{f"kl_reward {name}": {"kl_reward": 0.2, "kl_reward_estimator": name} for name in REWARD_DIVERGENCES.names},
    **{f"advantage {name}": {"advantage": {"baseline": name, "std": "none"}} for name in BASELINES.names},
    **{
        f"advantage {name} kl_reward": {"advantage": {"baseline": name, "std": "sample"}, "kl_reward": 0.2}
        for name in BASELINES.names
    },
    "kl_reward recompute": {"kl_reward": 0.2, "proximal": "recompute", "covariance": "kl_cov", **COVARIANCE},
    "distillation": {"distillation": {"teacher": TEACHER, "coefficient": 0.7}},
    "distillation alone": {"distillation": {"teacher": TEACHER, "rewards": False}},
    "distillation covariance=clip_cov": {
        "distillation": {"teacher": TEACHER},
        "covariance": "clip_cov",
        **COVARIANCE,
    },
    "entropy": {"entropy": 0.01},
    "aggregation=sequence_mean": {"aggregation": "sequence_mean"},
    "aggregation=sequence_sum": {"aggregation": "sequence_sum"},
    "aggregation=token_sum": {"aggregation": "token_sum"},
    "aggregation=sequence_sum_norm": {"aggregation": "sequence_sum_norm", "norm_length": 40},
    "several at once": {
        "proximal": "recompute",
        "mask": "second_moment",
        "covariance": "clip_cov",
        "weight": "sequence",
        "weight_gamma": 0.7,
        "discount": 0.9,
        "kl": 0.05,
        "entropy": 0.01,
        "dual_clip": 2.0,
        "aggregation": "sequence_mean",
        **COVARIANCE,
    },
}


@dataclass
class Row:
    """One setting, over all seeds."""

    setting: str
    against: str
    value: float = 0.0
    gradient: float = 0.0
    float32: float | None = None
    branches: Counter[str] = field(default_factory=Counter)

    @property
    def missed(self) -> list[str]:
        return [name for name, tokens in self.branches.items() if not tokens]

    @property
    def good(self) -> bool:
        return max(self.value, self.gradient) <= BAR and not self.missed

    def add(self, value: float, gradient: float, taken: Counter[str], float32: float | None = None) -> None:
        """One comparison more. A difference that is not finite counts as inf."""
        self.value, self.gradient = worst((self.value, value)), worst((self.gradient, gradient))
        if float32 is not None:
            self.float32 = worst((self.float32 or 0.0, float32))
        self.branches.update(taken)


def make_batch(seed: int, samples: int, longest: int) -> TokenBatch:
    """Answers of uneven length with stale, untrained and dropped tokens, some nats away from mu."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (samples,), generator=random)
    sample = torch.repeat_interleave(torch.arange(samples), lengths)
    count = len(sample)

    def normal(size: int = count) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    behaviour = -normal().abs() - 0.5
    drift = 0.06 * normal(samples)[sample]  # of whole answers, so that their geometric means differ
    return TokenBatch(
        logprobs=(behaviour + drift + 0.5 * normal()).requires_grad_(),
        entropy=normal().abs().requires_grad_(),
        behaviour=behaviour.masked_fill(torch.rand(count, generator=random) < 0.02, -math.inf),
        advantages=normal(samples)[sample],
        mask=torch.rand(count, generator=random) < 0.9,
        staleness=torch.randint(0, 9, (count,), generator=random),
        sample=sample,
        samples=samples,
        proximal=behaviour + drift + 0.4 * normal(),
        reference=behaviour + 0.4 * normal() + 3.5 * (torch.rand(count, generator=random) < 0.03),
        teacher=behaviour + 0.8 * normal(),
        full_kl=normal().abs().requires_grad_(),
    )


def against_reference(row: Row, batch: TokenBatch, config: AlgoConfig) -> None:
    """Compare one batch with the loop over its tokens, selections of the whole step included."""
    counts = Denominators.of(batch.mask[batch.sample == sample] for sample in range(batch.samples))
    fast, slow = with_selection(batch, config, slow=False), with_selection(batch, config, slow=True)
    expected, taken = slow_loss(slow, config, counts.tokens, counts.rollouts)
    value, _ = policy_loss(fast, config, counts)
    rounded = with_dtype(fast, torch.float32)
    exact = with_dtype(rounded, torch.float64)
    row.add(
        relative(value.detach(), expected.detach()),
        relative(gradients(value, fast), gradients(expected, slow)),
        taken,
        relative(
            gradients(policy_loss(rounded, config, counts)[0], rounded).double(),
            gradients(policy_loss(exact, config, counts)[0], exact),
        ),
    )


def with_selection(batch: TokenBatch, config: AlgoConfig, *, slow: bool) -> TokenBatch:
    """The batch with what the rules of the whole step take and make of it: by streamrl, or by the loops."""
    if config.kl_reward or config.advantage != AdvantageConfig():
        batch = replace(batch, advantages=penalised(batch, config, slow=slow))
    trained = batch.mask.nonzero().squeeze(-1)
    tokens = batch.select(trained)
    scores = batch.logprobs.detach() if config.proximal != "recompute" or batch.proximal is None else batch.proximal
    scores, place = scores[trained], torch.arange(len(trained))
    outliers = covariant = torch.zeros(len(trained), dtype=torch.bool)
    if slow and config.mask == "second_moment":
        measured = tokens.behaviour.isfinite()
        outliers[measured] = torch.tensor(
            slow_outliers((scores - tokens.behaviour)[measured].tolist(), config.second_moment)
        )
    if slow and config.covariance != "none":
        covariant = torch.tensor(slow_covariant(scores, tokens, place, STEP, config))
    if not slow:
        step = StepTokens(
            scores=scores,
            behaviour=tokens.behaviour,
            advantages=tokens.advantages,
            staleness=tokens.staleness,
            place=place,
            teacher=tokens.teacher,
        )
        picked = select(step, STEP, config)
        outliers = outliers if picked.outliers is None else picked.outliers
        covariant = covariant if picked.covariant is None else picked.covariant
    nothing = torch.zeros_like(batch.mask)
    return replace(
        batch,
        outliers=nothing.index_put((trained,), outliers),
        covariant=nothing.index_put((trained,), covariant),
        mean_weight=_mean_weight(batch, config, slow=slow) if config.weight_normalise else None,
    )


def penalised(batch: TokenBatch, config: AlgoConfig, *, slow: bool) -> Tensor:
    """The advantages [N] of the samples in groups of GROUP, their advantages being taken for rewards."""
    rewards = torch.zeros(batch.samples, dtype=torch.float64).index_put((batch.sample,), batch.advantages)
    if slow:
        expected = slow_penalised_advantages(batch, rewards.tolist(), GROUP, config)
        return torch.tensor(expected, dtype=torch.float64)[batch.sample]
    lengths = torch.bincount(batch.sample[batch.mask], minlength=batch.samples)
    outcomes = Outcomes(
        rewards=rewards,
        valid=torch.ones(batch.samples, dtype=torch.bool),
        first_place=lengths.cumsum(0) - lengths,
        lengths=lengths,
        sizes=(GROUP,) * (batch.samples // GROUP),
    )
    tokens = batch.select(batch.mask.nonzero().squeeze(-1))
    old = tokens.proximal if config.proximal == "recompute" else tokens.behaviour
    assert old is not None
    assert tokens.reference is not None
    penalty = torch.zeros_like(rewards).index_add(
        0,
        outcomes.answer_of(torch.arange(len(tokens.mask))),
        reward_kl(old, tokens.reference, tokens.behaviour, config),
    )
    return penalised_advantages(outcomes, penalty, config)[batch.sample]


def _mean_weight(batch: TokenBatch, config: AlgoConfig, *, slow: bool) -> float:
    if slow:
        return slow_mean_weight(batch, config)
    total, count = weight_sums(batch, config).tolist()
    return total / count


def with_dtype(batch: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """The batch with its floats in another dtype, log-probs and entropies as new leaves."""
    floats = ("logprobs", "entropy", "behaviour", "advantages", "proximal", "reference", "teacher", "full_kl")
    cast = {name: getattr(batch, name).detach().to(dtype) for name in floats}
    for name in ("logprobs", "entropy", "full_kl"):
        cast[name].requires_grad_()
    return replace(batch, **cast)


def gradients(loss: Tensor, batch: TokenBatch) -> Tensor:
    """[3, N], by log-prob, entropy and the divergence over the whole vocabulary."""
    leaves = [leaf for leaf in (batch.logprobs, batch.entropy, batch.full_kl) if leaf is not None]
    return torch.stack(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, over the largest entry of `theirs`."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# -- TRL

TRL_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"loss=clip {aggregation} ({loss_type})": ({"aggregation": aggregation}, loss_type)
        for aggregation, loss_types in TRL_LOSS.items()
        for loss_type in loss_types
    },
    "loss=clip dual_clip": ({"dual_clip": 1.5}, "dapo"),
    "loss=cispo": ({"loss": "cispo", "eps_low": 1.0}, "cispo"),
    "loss=gspo": ({"loss": "gspo", "eps_low": 0.05, "eps_high": 0.1, "dual_clip": 1.12}, "dapo"),
    # TRL rounds the temperatures of sapo to float32: these are exact in it.
    "loss=sapo": (
        {"loss": "sapo", "aggregation": "sequence_mean", "sapo_positive": 0.75, "sapo_negative": 1.5},
        "sapo",
    ),
    "kl": ({"kl": 0.1}, "dapo"),
    "entropy": ({"entropy": 0.01}, "dapo"),
    "proximal=interpolate weight=token": ({"proximal": "interpolate", "weight": "token", "weight_cap": 1.2}, "dapo"),
    "proximal=recompute weight=token": ({"proximal": "recompute", "weight": "token", "weight_cap": 1.2}, "dapo"),
}
STALENESS = 3  # of every token: `interpolate` has alpha = 3 / 4


def against_trl(name: str) -> Row:
    keys, loss_type = TRL_SETTINGS[name]
    config = AlgoConfig(**({"weight": "none", "norm_length": NORM_LENGTH} | keys))
    data = rectangular(spread=1.0 if config.weight == "token" else 0.6, drift=1.0 if config.loss == "gspo" else 0.0)
    batch = replace(token_batch(data, STALENESS), proximal=data["reference"].flatten())
    counts = Denominators.of(data["mask"])
    old, weight = data["old"], None
    if config.weight == "token":
        between = data["old"] + STALENESS / (STALENESS + 1) * (data["logprobs"].detach() - data["old"])
        old = between if config.proximal == "interpolate" else data["reference"]
        weight = (old - data["old"]).exp().clamp(max=config.weight_cap)
    theirs, _ = trl_loss(data, loss_type, config, old, weight)
    ours, _ = policy_loss(batch, config, counts)
    leaves = (data["logprobs"], data["entropy"])

    def both(loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)
        return torch.stack(found)

    _, taken = slow_loss(batch, config, counts.tokens, counts.rollouts)
    del taken["dropped"]  # TRL knows none
    if config.eps_low == 1:
        del taken["below"]  # the lower edge is 0
    row = Row(name, f"TRL {loss_type}")
    row.add(relative(ours.detach(), theirs.detach()), relative(both(ours), both(theirs)), taken)
    return row


# -- the table


def combinations() -> Iterator[AlgoConfig]:
    """Every setting of every choice with every other, as far as they go together; estimators and limits in turn."""
    choices = {
        "loss": LOSSES.names,
        "proximal": PROXIMALS.names,
        "weight": ("none", "token", "sequence"),
        "mask": ("none", "token", "sequence", "geometric", "second_moment"),
        "aggregation": AGGREGATIONS.names,
        "covariance": ("none", "clip_cov", "kl_cov"),
    }
    estimators, limits = itertools.cycle(DIVERGENCES.names), itertools.cycle(LIMITS.items())
    for chosen in itertools.product(*choices.values()):
        keys: dict[str, Any] = dict(zip(choices, chosen, strict=True)) | COVARIANCE
        if keys["mask"] == "second_moment" and keys["proximal"] != "recompute":
            continue
        keys |= WIDE if keys["mask"] == "geometric" else {}
        keys |= {"dual_clip": 1.5} if keys["loss"] in ("clip", "gspo") else {}
        keys |= DPPO if keys["loss"] in ("dppo_tv", "dppo_kl") else {}
        further, limit = next(limits)
        keys |= {"more_masks": [{"mask": further, "mask_high": limit}], "kl_estimator": next(estimators)}
        keys["weight_normalise"] = keys["proximal"] == "recompute" and keys["weight"] != "none"
        yield AlgoConfig(**keys, norm_length=40, weight_gamma=0.8, discount=0.9, kl=0.1, entropy=0.01)


def against_critic(seeds: Sequence[int]) -> Iterator[Row]:
    """Advantages of a critic (`gradient`: whitened ones) and its loss, against loops over tokens."""
    rows: dict[str, Row] = {}
    for seed in seeds:
        for name, ours, theirs, gradient, expected, taken in compared(seed):
            rows.setdefault(name, Row(name, "loop")).add(relative(ours, theirs), relative(gradient, expected), taken)
    yield from rows.values()


def measure(quick: bool) -> Iterator[Row]:
    seeds = range(1) if quick else range(4)
    for name, keys in SETTINGS.items():
        row = Row(name, "loop")
        for seed in seeds:
            against_reference(row, make_batch(seed, samples=40, longest=40), AlgoConfig(**keys))
        yield row
    yield from against_critic(seeds)
    for name in TRL_SETTINGS:
        yield against_trl(name)
    row = Row("kl full from logits", "loop")
    for seed in seeds:
        row.add(*full_kl_differences(seed))
    yield row
    every = list(combinations())[:: 20 if quick else 1]
    row = Row(f"{len(every)} combinations", "loop")
    for seed, config in enumerate(every):
        against_reference(row, make_batch(100 + seed, samples=6, longest=8), config)
    yield row


def show(row: Row) -> None:
    float32 = "" if row.float32 is None else f"{row.float32:.1e}"
    counts = ", ".join(f"{name} {tokens}" for name, tokens in row.branches.items())
    verdict = "" if row.good else f"   FAILED {', '.join(row.missed)}"
    print(
        f"{row.setting:40s} {row.against:12s} {row.value:8.1e} {row.gradient:8.1e} {float32:>8s}   {counts}{verdict}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a twentieth of the combinations")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    print(f"{'setting':40s} {'against':12s} {'value':>8s} {'gradient':>8s} {'float32':>8s}   tokens of each branch")
    rows = []
    for row in measure(options.quick):
        rows.append(row)
        show(row)
    worst = max(max(row.value, row.gradient) for row in rows)
    print(f"largest difference {worst:.1e} (bar {BAR:g}), branches missed {sum(len(row.missed) for row in rows)}")
    if options.json:
        table = [{**vars(row), "good": row.good} for row in rows]
        options.json.write_text(json.dumps({"benchmark": "losses", "bar": BAR, "rows": table}) + "\n")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
