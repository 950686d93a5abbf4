"""What is done to the tokens of a step whose log-prob and advantage covary most.

The class is loaded by processes without torch: its methods import it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.algo import AlgoConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """The n trained tokens of a whole step whose mu is finite, in any order, without gradient."""

    covariance: Tensor  # float64 [n], of log-prob and advantage, centred over the step
    stopped: Tensor  # bool [n], those whose gradient the family's clip has taken away
    lots: Tensor  # int64 [n], all different, drawn for this step


class Regulariser(Choice, ABC):
    """Picks tokens once a step, before its first update; what it does to them is a mask, a penalty, or both."""

    acts = True  # False: nothing is picked, and the step needs no forward pass for it
    of_ratio = False  # True: it acts by the ratio to the proximal policy alone, not where that is 1 for every token
    label = "own"  # of the metrics weights/masked_LABEL and loss/LABEL

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.covariance_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def pick(self, measured: Measured, config: AlgoConfig) -> Tensor:
        """The tokens that it acts on: bool [n]. The same ones for every order of the tokens."""

    def mask(self, picked: Tensor) -> Tensor | None:
        """The tokens whose weight becomes 0: bool [n]; None for none."""
        return None

    def penalty(self, picked: Tensor, log_r: Tensor, config: AlgoConfig) -> Tensor | None:
        """What is added to the loss of every token: float [n] with gradient; None for nothing."""
        return None


def first(order: Tensor, measured: Measured, config: AlgoConfig) -> Tensor:
    """As many of the tokens at `order` as `algo.covariance_share` says, at least one: bool [n]."""
    import torch

    count = max(int(config.covariance_share * len(measured.covariance)), 1)  # at least one, as in the paper's code
    return torch.zeros_like(measured.covariance, dtype=torch.bool).index_fill(0, order[:count], True)
