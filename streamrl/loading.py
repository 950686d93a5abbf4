"""Modules are loaded without garbage collections: of what a library defines nothing is garbage, and it is much."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections(*, for_good: bool = False) -> Iterator[None]:
    """No collection until the end; `for_good`: and none later of what is there then.

    That is for a process that has only begun: what is garbage by then, with its sockets, would never be freed.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if collected:
            gc.enable()
