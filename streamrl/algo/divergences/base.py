"""What an estimator of a KL divergence is: a function of one token's log-ratio.

The class is loaded by processes without torch: `estimate` imports it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor


class Divergence(Choice, ABC):
    """Estimates KL(p || p') of every token from the token that p drew."""

    of_vocabulary = False
    """It is made where the logits of both policies are, and `TokenBatch.full_kl` has it: `estimate` is not asked."""

    follows_k2 = False
    """Its gradient is that of k2 already, which on p's own tokens is in the mean that of the divergence; or that."""

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.kl_estimator_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def estimate(self, difference: Tensor) -> Tensor:
        """The estimate, nats: float [n], with the gradient of the difference; 0 at 0.

        difference: float [n], `log p' - log p`, clamped to +-20.
        """
