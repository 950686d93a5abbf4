"""streamrl: asynchronous off-policy streaming reinforcement learning for language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.api.run import Run as Run
    from streamrl.api.run import RunFailed as RunFailed
    from streamrl.api.train import train as train
    from streamrl.config.file import ConfigError as ConfigError

__version__ = "0.3.0"

# What `import streamrl` offers, and where it is. Loaded when it is asked for: every process of a run imports streamrl.
_PUBLIC = {
    "ConfigError": "streamrl.config.file",
    "Run": "streamrl.api.run",
    "RunFailed": "streamrl.api.run",
    "train": "streamrl.api.train",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
