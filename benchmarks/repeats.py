"""What several repeats of a measurement say beside their median."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)
