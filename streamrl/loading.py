"""Modules are loaded without garbage collections: of what a library defines nothing is garbage, and it is much."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """No collection until the end, and none later of what was there then (`gc.freeze`)."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
