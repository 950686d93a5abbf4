"""Whether Transformer Engine can be used here, found out by importing it: its files alone do not say."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

PACKAGE = "transformer_engine"
TORCH_PART = f"{PACKAGE}.pytorch"


@functools.cache
def te_problem() -> str | None:
    """What is wrong with it, as the end of a sentence that begins with its name; None where it can be used."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "is not installed"
    try:
        importlib.import_module(TORCH_PART)
    except Exception as error:  # a library of it that is missing is a FileNotFoundError, a driver's an OSError
        return f"cannot be imported ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return None


def start_overlap(tokens: int, hidden: int, ranks: int, backend: str) -> None:
    """Make the buffers of `learner.tp_comm_overlap`, once a process. Collective; the process groups are there.

    tokens: of every row, over all tensor-parallel `ranks`; hidden: of a token; backend: by which they meet. The buffers
    are bfloat16 [tokens, hidden], and a row of another length is an error of Transformer Engine's. Never run.
    """
    base: Any = importlib.import_module(f"{TORCH_PART}.module.base")
    base.initialize_ub(shape=[tokens, hidden], tp_size=ranks, bootstrap_backend=backend)
