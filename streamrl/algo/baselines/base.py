"""What a baseline is: what the rewards of one group are measured from.

The class is loaded by processes without torch: `left` imports it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor


class Baseline(Choice, ABC):
    """Takes from the reward of every answer what its group makes one expect."""

    least_samples = 2  # of a group whose answers may have an advantage besides 0
    needs_lengths = False  # whether `left` reads the lengths of the answers

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.advantage.baseline_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def left(self, centred: Tensor, lengths: Tensor | None) -> Tensor:
        """`R_i - b_i` of the n >= 2 answers of a group, in the unit of `centred`: float64 [n].

        centred: float64 [n], the rewards less their mean, in units of the largest; lengths: int64 [n], trained tokens,
        None unless `needs_lengths`.
        """
