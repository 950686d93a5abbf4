"""Failed samples in words: how many, for which reasons, and on how many answers the scorer raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.types import FAILURES


def failed_samples(rows: Sequence[dict[str, Any]]) -> str | None:
    """What failed in these rows of `metrics.jsonl`, in words; None where nothing did.

    >>> failed_samples([{"samples/all": 64, "samples/failed": 3, "samples/failed_too_long": 3, "reward/failed": 1}])
    '3 of 64 samples not trained: too_long 3; the scorer raised on 1'
    """
    every, failed, raised = (_sum(rows, name) for name in ("samples/all", "samples/failed", "reward/failed"))
    words = []
    if failed:
        counts = {reason: _sum(rows, f"samples/failed_{reason}") for reason in FAILURES}
        ordered = sorted((item for item in counts.items() if item[1]), key=lambda item: -item[1])
        reasons = ", ".join(f"{reason} {count:,.0f}" for reason, count in ordered)
        words.append(f"{failed:,.0f} of {every:,.0f} samples not trained" + (f": {reasons}" if reasons else ""))
    if raised:
        words.append(f"the scorer raised on {raised:,.0f}" + ("" if failed else f" of {every:,.0f} answers"))
    return "; ".join(words) or None


def _sum(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0 for row in rows)
