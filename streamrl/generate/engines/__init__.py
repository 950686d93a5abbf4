"""What answers requests: `generate.engine`, `evaluate.engine`, and a judge's. `base.py` says what an engine is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.choices import ENGINES
from streamrl.config.words import checked
from streamrl.generate.engines.base import Engine


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """The engine of that name or path. Raises ValueError, with a line that begins with a key, for what does not fit."""
    declaration: type[Engine] = ENGINES.load(name)
    return declaration(checked(declaration.Options, options, "evaluate.engine_options"))
