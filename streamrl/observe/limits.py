"""How far the log-probs of a run may be from those of another implementation.

float32: two implementations differ by rounding alone, which a limit knows. bfloat16: how much rounding changes depends
on the model, so that it is measured on tokens of the run itself: the same weights, by the same implementation, computed
once in float32 and once in bfloat16. What the servers differ by is of that size, as they round elsewhere. fp8: servers
with `generate.quantization`, compared with the bfloat16 weights that they quantised; e4m3 has three bits of mantissa
where bfloat16 has seven. No other implementation rounds as they do. A tiny model has 0.026 on average by the CPU's
stand-in; no GPU has been measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.config import Config


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest allowed log-prob differences, in nats: of any token, of 99 in 100, and on average."""

    largest: float
    p99: float
    mean: float

    def times(self, factor: float) -> Limits:
        return Limits(self.largest * factor, self.p99 * factor, self.mean * factor)


# Those of bfloat16 hold where nothing was measured.
LIMITS = {"float32": Limits(1e-4, 1e-4, 1e-5), "bfloat16": Limits(2.0, 0.3, 0.05), "fp8": Limits(4.0, 0.9, 0.15)}
MARGIN = 3.0  # how many times the run's own rounding the differences to its servers may be

# How many times what decode and prefill of one server differ by. They have their linear layers in common, learner and
# server nothing: the tiny model has 2 to 4 times that on a CPU (`benchmarks/mismatch.py`); no GPU has been measured.
DECODE_MARGIN = 10.0


def numbers_of(config: Config) -> str:
    """What the servers of a run compute in, as LIMITS calls it."""
    return config.generate.quantization or config.model.dtype


def limits_of(config: Config) -> Limits:
    return LIMITS[numbers_of(config)]


def rounds(config: Config) -> bool:
    """Whether the limits are those of the run's own rounding."""
    return numbers_of(config) == "bfloat16"


def of_rounding(differences: Sequence[np.ndarray]) -> Limits | None:
    """The rounding that was measured: |log-prob in bfloat16 - log-prob in float32| of tokens; None without any.

    Where one of them is not finite there is no difference, and no limit follows from it.
    """
    found = np.concatenate([*differences, np.zeros(0)])
    found = found[np.isfinite(found)]
    if not len(found):
        return None
    return Limits(float(found.max()), percentile(found, 99), float(found.mean()))


def percentile(differences: np.ndarray, share: float) -> float:
    """The smallest difference that at most 100 - `share` in a hundred exceed; an infinite one is one as any other."""
    return float(np.percentile(differences, share, method="higher"))


def by_decode(rounding: Limits) -> Limits:
    """What a server is held to whose decode and prefill are so far apart."""
    return rounding.times(DECODE_MARGIN)


def derived(limits: Limits, rounding: Limits | None, tolerance: float | None) -> Limits:
    """What a run is held to: MARGIN times its rounding where that was measured, and `tolerance` where it is given."""
    if rounding is not None:
        limits = rounding.times(MARGIN)
    return limits if tolerance is None else replace(limits, largest=tolerance)
