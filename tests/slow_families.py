"""Which model families a test of all of them takes in `make test`; the others are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(families: Iterable[str], *fast: str) -> list[Any]:
    """The families as parameters, marked slow but for those named."""
    return [family if family in fast else pytest.param(family, marks=pytest.mark.slow) for family in families]
