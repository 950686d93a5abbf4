"""What a family of the policy loss is: the factor S beside the importance weight w in `L = -w S`.

A family is a pure function of the tokens and of `log r = log pi - log pi_old`. The class is loaded by processes without
torch: `surrogate` imports it, the module does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig

# The ways in which a token can be clipped, as the metrics have them.
CLIPPED = ("clip_low", "clip_high", "clip_dual")


class Family(Choice, ABC):
    """A surrogate of the policy loss."""

    # With `pi / pi_old` in the surrogate, `proximal: behaviour` has corrected for the stale data already, and the
    # importance weight divides that out again (w = f / q). Without, the weight is all the correction there is (w = f).
    has_ratio = True

    # S grows with the token's `pi / pi_old`, as that of `clip` does where A < 0: f / q caps it. Without, S bounds its
    # ratio itself, or has another than the token's, and `proximal: behaviour` leaves it as published (w = 1).
    needs_cap = True

    # Of CLIPPED, those whose tokens lose their gradient: `offpolicy/clipped` counts them.
    stops: frozenset[str] = frozenset(CLIPPED)

    # It trains rows of a data set as they are: no reward and no generator is asked (`streamrl sft`).
    of_rows = False

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.loss_options`, of the class's own Options."""
        self.options = options

    @classmethod
    def check(cls, section: AlgoConfig) -> None:
        if section.dual_clip is not None and "dual_clip" not in cls.uses:
            raise ValueError(f"dual_clip: {section.dual_clip:g} does nothing with loss={section.loss}; allowed: null")

    @abstractmethod
    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        """S [n] with gradient, and which tokens were clipped: bool [n] for each of CLIPPED.

        tokens: the n measured tokens; log_r: float [n], with gradient.
        """

    def stopped(self, log_r: Tensor, advantages: Tensor, config: AlgoConfig) -> Tensor:
        """Tokens whose gradient the clip of their own ratio has taken away: bool [n]. Here: none."""
        from streamrl.algo.clipping import nowhere

        return nowhere(log_r)
