"""An adaptive weight of the KL divergence to the reference policy: it keeps the divergence near a target.

metrics of a step ──update──▶ factor ──applied──▶ the settings that the next step trains with
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from streamrl.config.algo import AlgoConfig

# The relative error counts no further: one step moves the weight by a fifth at most.
LARGEST_ERROR = 0.2


class KlControl:
    """The weight `algo.kl` or `algo.kl_reward`, whichever is above 0, times a factor that follows the measured KL.

    factor <- factor (1 + clip(KL / target - 1, -0.2, 0.2) min(n, horizon) / horizon), n the rollouts of the step;
    without `algo.kl_target` it stays 1. Source: Ziegler et al. (arXiv:1909.08593).

    Example: target 0.1, horizon 100: a step of 50 rollouts with a KL of 0.2 makes the weight 10 % larger.
    """

    def __init__(self, config: AlgoConfig) -> None:
        self._config = config
        self.factor = 1.0

    @property
    def _key(self) -> str:
        return "kl_reward" if self._config.kl_reward > 0 else "kl"

    @property
    def weight(self) -> float:
        """What the KL of a token is multiplied with at present."""
        return float(getattr(self._config, self._key)) * self.factor

    def applied(self) -> AlgoConfig:
        """The settings with the present weight."""
        if self._config.kl_target is None:
            return self._config
        return self._config.model_copy(update={self._key: self.weight})

    def metrics(self) -> dict[str, float]:
        """`reward/kl_weight` or `loss/kl_weight`; nothing where the weight is fixed."""
        if self._config.kl_target is None:
            return {}
        return {("reward" if self._config.kl_reward > 0 else "loss") + "/kl_weight": self.weight}

    def update(self, measured: Mapping[str, float], rollouts: int) -> None:
        """After a step: measured: its metrics; rollouts: of all ranks.

        A KL that is not finite changes nothing, and a step that measured none does not.
        """
        target = self._config.kl_target
        if target is None:
            return
        kl = measured.get("reward/kl" if self._config.kl_reward > 0 else "loss/kl", math.nan)
        if not math.isfinite(kl):
            return
        error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.factor *= 1 + error * min(rollouts, self._config.kl_horizon) / self._config.kl_horizon
