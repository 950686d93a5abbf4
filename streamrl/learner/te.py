"""Whether Transformer Engine can be used here, found out by importing it: its files alone do not say."""

from __future__ import annotations

import functools
import importlib
import importlib.util

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
