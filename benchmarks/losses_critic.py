"""A critic's advantages and loss as their equations read, one token at a time in float64, and the rows that compare.

Nothing here is shared with the code that it judges, save the tokens and the settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.algo.gae import explained_variance, gae, moments, token_rewards, value_loss, whiten

SETTINGS: dict[str, dict[str, Any]] = {
    "estimator=gae": {"gamma": 1.0, "lam": 1.0},
    "estimator=gae discounted": {"gamma": 0.97, "lam": 0.9},
    "estimator=gae lam=0": {"gamma": 0.9, "lam": 0.0},
    "estimator=gae kl_reward": {"gamma": 0.99, "lam": 0.95, "penalty": True},
}

LOSSES: dict[str, float | None] = {"value loss": None, "value loss value_clip": 0.5}  # with their clip
EXPLAINED = "explained variance"

Compared = tuple[str, Tensor, Tensor, Tensor, Tensor, Counter[str]]  # ours and theirs: value, gradient


def slow_rewards(rewards: Sequence[float], sample: Sequence[int], penalty: Sequence[float]) -> list[float]:
    """The reward of each token; rewards: of the answer that a token is of."""
    last = {answer: place for place, answer in enumerate(sample)}
    return [(rewards[t] if last[sample[t]] == t else 0.0) - penalty[t] for t in range(len(sample))]


def slow_gae(
    rewards: Sequence[float], values: Sequence[float], sample: Sequence[int], gamma: float, lam: float
) -> list[float]:
    """From the last token of each answer to its first."""
    advantages = [0.0] * len(sample)
    for t in reversed(range(len(sample))):
        goes_on = t + 1 < len(sample) and sample[t + 1] == sample[t]
        next_value, next_advantage = (values[t + 1], advantages[t + 1]) if goes_on else (0.0, 0.0)
        advantages[t] = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
    return advantages


def slow_whitened(advantages: Sequence[float]) -> list[float]:
    mean = math.fsum(advantages) / len(advantages)
    variance = math.fsum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
    return [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages]


def slow_value_loss(
    values: Tensor, old: Sequence[float], returns: Sequence[float], clip: float | None
) -> tuple[Tensor, Counter[str]]:
    """The sum over tokens, with gradient, and how many took each branch."""
    total = torch.zeros((), dtype=torch.float64)
    counts = Counter({"far": 0, "near": 0, "clipped": 0, "plain": 0} if clip is not None else {"plain": 0})
    for t in range(len(old)):
        squared, value = (values[t] - returns[t]) ** 2, values[t]
        now = float(value.detach())
        if clip is not None:
            counts["far" if abs(now - old[t]) > clip else "near"] += 1
            low, high = old[t] - clip, old[t] + clip
            edge = torch.tensor(low if now < low else high, dtype=torch.float64)
            held = value if low <= now <= high else edge
            other = (held - returns[t]) ** 2
            is_clipped = bool(other > squared)
            counts["clipped" if is_clipped else "plain"] += 1
            squared = other if is_clipped else squared
        else:
            counts["plain"] += 1
        total = total + squared / 2
    return total, counts


def slow_explained_variance(returns: Sequence[float], values: Sequence[float]) -> float:
    def variance(numbers: Sequence[float]) -> float:
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)

    return 1.0 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)


def make_answers(seed: int, samples: int = 40, longest: int = 40) -> dict[str, Tensor]:
    """Answers of uneven length, one after the other; values and penalties of their tokens, float64."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (samples,), generator=random)
    sample = torch.repeat_interleave(torch.arange(samples), lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    count = len(sample)
    return {
        "sample": sample,
        "rewards": normal(samples)[sample],
        "old": normal(count),
        "values": normal(count),
        "penalty": 0.1 * normal(count).abs(),
    }


def compared(seed: int) -> Iterator[Compared]:
    """(setting, our value, theirs, our gradient, theirs, branches); gradients of advantages: whitened ones instead."""
    answers = make_answers(seed)
    sample, old = answers["sample"].tolist(), answers["old"].tolist()
    for name, keys in SETTINGS.items():
        penalty = answers["penalty"] if keys.get("penalty") else None
        none = torch.zeros_like(answers["penalty"])
        rewards = token_rewards(answers["rewards"], answers["sample"], penalty)
        ours = gae(rewards, answers["old"], answers["sample"], gamma=keys["gamma"], lam=keys["lam"])
        each = slow_rewards(answers["rewards"].tolist(), sample, (none if penalty is None else penalty).tolist())
        theirs = slow_gae(each, old, sample, keys["gamma"], keys["lam"])
        ends = len(set(sample))
        white = torch.tensor(slow_whitened(theirs), dtype=torch.float64)
        taken = Counter({"goes on": len(sample) - ends, "ends": ends})
        yield name, ours, torch.tensor(theirs, dtype=torch.float64), whiten(ours, moments(ours)), white, taken
    returns = ours + answers["old"]
    for name, clip in LOSSES.items():
        leaves = [answers["values"].clone().requires_grad_() for _ in range(2)]
        fast, _ = value_loss(leaves[0], answers["old"], returns, clip)
        slow, taken = slow_value_loss(leaves[1], old, returns.tolist(), clip)
        gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((fast.sum(), slow), leaves, strict=True)]
        yield name, fast.sum().detach(), slow.detach(), gradients[0], gradients[1], taken
    explained = explained_variance(moments(returns), moments(returns - answers["old"]))
    slow_explained = slow_explained_variance(returns.tolist(), old)
    pair = torch.tensor([explained, slow_explained], dtype=torch.float64)
    yield EXPLAINED, pair[0], pair[1], pair[0], pair[1], Counter({"tokens": len(sample)})
