"""What an aggregation is: how much each token counts in the mean over an update.

The class is loaded by processes without torch: its methods import it, the module does not.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts of one update, over all its micro batches and data-parallel ranks.

    With one mini batch an update is the whole step. Tokens that an importance mask zeroes and tokens that are
    dropped because mu is not finite are trained tokens and count. Example: answers with masks 110 and 00 (a
    placeholder) give `Denominators(2, 1)`.
    """

    tokens: int  # trained tokens (loss mask True)
    rollouts: int  # rollouts with at least one trained token, in whichever of their branches

    @classmethod
    def of(cls, loss_masks: Iterable[Tensor | np.ndarray], branches: Sequence[int] = ()) -> Denominators:
        """Count the loss masks (bool [T], torch or numpy) of all samples of an update.

        branches: samples of each rollout, which follow one another; (): one each.
        """
        trained = [int(mask.sum()) for mask in loss_masks]
        edges = itertools.pairwise(itertools.accumulate(branches or (1,) * len(trained), initial=0))
        return cls(tokens=sum(trained), rollouts=sum(any(trained[start:end]) for start, end in edges))


class Aggregation(Choice, ABC):
    """The weights of a mean: parts of one update are added, never averaged."""

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.aggregation_options`, of the class's own Options."""
        self.options = options

    @abstractmethod
    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        """What each token counts in the mean over the update: [N], dtype of the log-probs; any value off the mask."""
