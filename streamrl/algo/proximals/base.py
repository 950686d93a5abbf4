"""What a proximal policy is: the policy pi_old that the surrogate's ratio is taken to.

The class is loaded by processes without torch: its methods import it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor


class Proximal(Choice, ABC):
    """Gives log pi_old of every token."""

    of_policy = False
    """pi_old is mu: the surrogate's ratio pi / pi_old is the whole correction for stale data."""

    scored = False
    """It needs the log-probs under the weights that the step starts from: one more forward pass."""

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.proximal_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def logprobs(self, behaviour: Tensor, log_rho: Tensor, staleness: Tensor, scores: Tensor | None) -> Tensor:
        """log pi_old: float [n], without gradient.

        behaviour, log_rho: float [n], log mu and log pi - log mu; staleness: int64 [n]; scores: float [n], log-probs
        of the weights that the step starts from. Raises ValueError where it needs them and they are missing.
        """
