"""Generalised advantage estimation from a critic's values, and the critic's loss.

    values, rewards ──▶ advantages ──whiten──▶ the policy's    advantages + values ──▶ returns ──▶ value loss

All tokens here are trained ones: what an answer has between them (a tool's words) is no step. Source: GAE
(arXiv:1506.02438), PPO (arXiv:1707.06347).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Added to the variance that advantages are divided by the root of.
WHITEN_EPS = 1e-8

# What is left of a sum of squares less that of the mean, over the sum, where nothing but rounding is left.
ROUNDING = 1e-12


def token_rewards(rewards: Tensor, sample: Tensor, penalty: Tensor | None = None) -> Tensor:
    """The reward of each token: that of its answer at the answer's last one, less the token's own penalty; float64 [N].

    rewards: [N], of the answer that a token is of; sample: int64 [N], answers one after the other, tokens in order.

    >>> token_rewards(torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0, 0, 1]))
    tensor([0.0000, 1.0000, 0.5000], dtype=torch.float64)
    """
    given = torch.where(_follows(sample, 1), 0.0, rewards.double())
    return given if penalty is None else given - penalty.double()


def gae(rewards: Tensor, values: Tensor, sample: Tensor, *, gamma: float, lam: float) -> Tensor:
    """`A_t = d_t + gamma lam A_t+1` with `d_t = r_t + gamma V_t+1 - V_t`, both 0 behind an answer's last token.

    rewards, values: [N]; sample: as `token_rewards`. Returns float64 [N], without gradient. The sum is taken over
    windows of doubling length, so that a row of any number of answers takes log2 of the longest.

    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), gamma=1.0, lam=1.0)
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    values = values.detach().double()
    summed = rewards.double() + gamma * _ahead(values, sample, 1) - values
    reach, factor = 1, gamma * lam
    while reach < len(sample) and bool(_follows(sample, reach).any()):
        summed = summed + factor * _ahead(summed, sample, reach)
        reach, factor = 2 * reach, factor * factor
    return summed


def moments(values: Tensor) -> Tensor:
    """Count, sum and sum of squares, float64 [3]: those of parts add up."""
    wide = values.double()
    return torch.stack([wide.new_tensor(float(wide.numel())), wide.sum(), wide.square().sum()])


def whiten(advantages: Tensor, of_all: Tensor) -> Tensor:
    """`(A - mean) / sqrt(variance + 1e-8)` by the `moments` of all advantages of a step: float64 [N]."""
    count, total, _ = of_all.tolist()
    mean = total / max(1.0, count)
    return (advantages.double() - mean) / (variance(of_all, correction=1) + WHITEN_EPS) ** 0.5


def variance(of_all: Tensor, correction: int = 0) -> float:
    """By `moments`; 0 of fewer than two values, and of values that differ by no more than the sums are rounded."""
    count, total, squares = of_all.tolist()
    if count < 2:
        return 0.0
    left = squares - total * total / count
    return left / (count - correction) if left > ROUNDING * squares else 0.0


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2` of each token, float64 [N]; and where the clip acts.

    values: [N], with gradient; old: those of the step's start; clip: c, None leaves the first term alone.
    """
    wide, target = values.double(), returns.double()
    plain = (wide - target).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    near = old.double() + (wide - old.double()).clamp(-clip, clip)
    clipped = (near - target).square()
    return torch.maximum(plain, clipped) / 2, clipped.detach() > plain.detach()


def explained_variance(returns: Tensor, errors: Tensor) -> float | None:
    """`1 - Var(R - V) / Var(R)` by the `moments` of returns and of errors R - V; None where returns are all alike."""
    whole = variance(returns)
    return None if whole == 0 else 1.0 - variance(errors) / whole


def value_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """`values/mean`, `returns/mean` and `critic/explained_variance` of a step, from `value_sums` of all its tokens."""
    returns, errors = (_moments(sums, name) for name in ("returns", "errors"))
    count = max(1.0, float(returns[0]))
    explained = explained_variance(returns, errors)
    return {
        "values/mean": float(returns[1] - errors[1]) / count,
        "returns/mean": float(returns[1]) / count,
        **({} if explained is None else {"critic/explained_variance": explained}),
    }


def value_sums(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """What `value_metrics` reads, of some tokens."""
    found = {"returns": moments(returns), "errors": moments(returns.double() - values.double())}
    return {f"{name}/{index}": each for name, three in found.items() for index, each in enumerate(three)}


def _moments(sums: Mapping[str, Tensor], name: str) -> Tensor:
    return torch.stack([sums[f"{name}/{index}"] for index in range(3)])


def _follows(sample: Tensor, distance: int) -> Tensor:
    """Bool [N]: is the token so many places on of the same answer?"""
    same = torch.zeros(len(sample), dtype=torch.bool, device=sample.device)
    if distance < len(sample):
        same[:-distance] = sample[distance:] == sample[:-distance]
    return same


def _ahead(values: Tensor, sample: Tensor, distance: int) -> Tensor:
    """The value of the token so many places on, 0 behind its answer."""
    return torch.where(_follows(sample, distance), values.roll(-distance), 0.0)
