"""Which of many cases that are alike `make test` takes, model families above all; the others are `make test-all`'s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(families: Iterable[str], *fast: str) -> list[Any]:
    """The families as parameters, marked slow but for those named."""
    return [family if family in fast else pytest.param(family, marks=pytest.mark.slow) for family in families]
