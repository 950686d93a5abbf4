"""The estimate of small variance, with a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.k3 import K3

if TYPE_CHECKING:
    from torch import Tensor

MOST = 10.0  # nats a token


class ClampedK3(K3):
    """`k3`, at most 10 nats a token: beyond it has no gradient. As verl has it (`low_var_kl`)."""

    def estimate(self, difference: Tensor) -> Tensor:
        return super().estimate(difference).clamp(max=MOST)
