"""What an importance weight is: how far a token's policy is from the proximal one, and how much of that counts.

The class is loaded by processes without torch: its methods import it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class ImportanceWeight(Choice, ABC):
    """The weight w of a token in the loss: `f`, or by the family `f / q` or 1 with `proximal: behaviour`."""

    corrects = True
    """The weight counts how far mu, which drew the token, is from the proximal policy."""

    of_sample = False
    """All tokens of a sample have one weight, which counts once in the mean of `algo.weight_normalise`."""

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.weight_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def factors(
        self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig, *, of_policy: bool
    ) -> tuple[Tensor, Tensor]:
        """q and f of every token: float [n] both, > 0, without gradient.

        log_correction: float [n], log-ratio of the proximal policy and mu; with `of_policy` (`proximal: behaviour`)
        that of pi and mu. Masks and `algo.discount` follow.
        """
