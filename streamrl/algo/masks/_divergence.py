"""Masks by an estimate of the divergence KL(mu || pi_old): k2 and k3 of a token, or of a whole sample."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from streamrl.algo.masks.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class DivergenceMask(Mask):
    """Takes what is further away than `algo.mask_high`, nats."""

    uses = frozenset({"mask_high"})

    @classmethod
    def check(cls, section: AlgoConfig) -> None:
        if section.mask_high is None:
            raise ValueError(f"mask_high: a divergence in nats is needed by mask={section.mask}; allowed: above 0")

    def masked(self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> Tensor:
        from streamrl.algo.ratios import bounded

        assert config.mask_high is not None
        return self.distance(bounded(log_correction), tokens) > config.mask_high

    @abstractmethod
    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        """How far each token, or its sample, is from mu, nats: float [n]. difference: float [n], clamped to +-20."""


def k2(difference: Tensor) -> Tensor:
    """`d^2 / 2`: [n]."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """`exp(d) - 1 - d`: [n]."""
    return difference.exp() - 1 - difference
