"""Rules that look at all trained tokens of a step at once: the second-moment mask, and regularisers.

    first scores of the whole step ──select──▶ which tokens each rule takes ──▶ TokenBatch.outliers, .covariant

They are decided once a step, from the weights that it starts from, before its first update; all passes and mini
batches keep the decision. So neither packing, nor micro batches, nor layout changes it beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algo.distillation import distilled_advantages, reverse_kl
from streamrl.algo.families import family_of
from streamrl.algo.masks import mask_of
from streamrl.algo.proximals import proximal_of
from streamrl.algo.ratios import log_ratio
from streamrl.algo.regularisers import regulariser_of
from streamrl.algo.regularisers.base import Measured
from streamrl.algo.tokens import needed
from streamrl.config.algo import AlgoConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTokens:
    """The n trained tokens of a whole step, over all micro batches and ranks, in any order, without gradient."""

    scores: Tensor  # float32 or float64 [n], log pi of the weights that the step starts from
    behaviour: Tensor  # like scores, log mu; no rule takes a token where it is not finite
    advantages: Tensor  # like scores
    staleness: Tensor  # int64 [n], learner steps
    place: Tensor  # int64 [n], >= 0, number of the token in the step, the same for every packing
    teacher: Tensor | None = None  # like scores, log pi_T


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """Which of n tokens the rules take; None where a rule is off."""

    outliers: Tensor | None  # bool [n], those that `mask: second_moment` zeroes
    covariant: Tensor | None  # bool [n], those that `algo.covariance` acts on


def needs_selection(config: AlgoConfig) -> bool:
    """Whether `select` has something to decide."""
    return config.chosen("mask").whole_step or regulariser_of(config).acts


def needs_scores(config: AlgoConfig) -> bool:
    """Whether the step begins with a forward pass for log-probs alone."""
    return config.chosen("proximal").scored or needs_selection(config)


def select(tokens: StepTokens, seed: int, config: AlgoConfig) -> Selection:
    """What the rules of `config` take; `seed`: of the lots of this step."""
    measured = tokens.behaviour.isfinite().nonzero().squeeze(-1)
    scores = tokens.scores.detach().double()[measured]
    behaviour = tokens.behaviour.double()[measured]
    log_rho = log_ratio(scores, behaviour)

    def over_all(picked: Tensor) -> Tensor:
        return torch.zeros_like(tokens.place, dtype=torch.bool).index_fill(0, measured[picked], True)

    outliers = covariant = None
    mask = mask_of(config)
    if mask.whole_step:
        outliers = over_all(mask.outliers(log_rho, config))
    regulariser = regulariser_of(config)
    if regulariser.acts:
        advantages = _advantages(tokens, config)[measured]
        proximal = proximal_of(config).logprobs(behaviour, log_rho, tokens.staleness[measured], scores)
        seen = Measured(
            covariance=_centred(advantages) * _centred(scores),
            stopped=family_of(config).stopped(log_ratio(scores, proximal), advantages, config),
            lots=_lots(tokens.place, seed)[measured],
        )
        covariant = over_all(regulariser.pick(seen, config))
    return Selection(outliers=outliers, covariant=covariant)


def _advantages(tokens: StepTokens, config: AlgoConfig) -> Tensor:
    """float64 [n], with the teacher's part, as the first update will have them."""
    advantages = tokens.advantages.double()
    if not config.distils:
        return advantages
    setting = f"algo.distillation.teacher={config.distillation.teacher}"
    teacher = needed(tokens.teacher, "teacher", setting).double()
    return distilled_advantages(advantages, reverse_kl(tokens.scores.double(), teacher), config)


def second_moment_outliers(log_rho: Tensor, limit: float) -> Tensor:
    """The largest (log rho)^2, taken away until the mean of the others is <= `limit`: bool [n].

    log_rho: float64 [n], finite. Equal values go together, so that the order of the tokens does not matter.
    Source: M2PO (arXiv:2510.01161).

    >>> second_moment_outliers(torch.tensor([0.1, -1.0, 0.2], dtype=torch.float64), 0.04)
    tensor([False,  True, False])
    """
    squares = log_rho.square()
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    too_large = (means > limit).nonzero()
    if not len(too_large):
        return torch.zeros_like(squares, dtype=torch.bool)
    return squares >= ordered[too_large[0, 0]]


def _centred(values: Tensor) -> Tensor:
    return values - values.mean() if len(values) else values


def _lots(place: Tensor, seed: int) -> Tensor:
    """A number for every token, all different, drawn from the seed alone: int64 [n]."""
    count = int(place.max()) + 1 if len(place) else 0
    drawn = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(place.device)[place]
