"""What an adapter gives the server: an environment that plays episodes against a policy behind a base URL."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Refused(ValueError):
    """What cannot work here; one line that names it."""


@dataclass(frozen=True)
class Played:
    """What one episode was worth, on the wire as JSON."""

    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # why there is no reward
    masked: bool = False  # the failure says nothing of the policy


class Player(ABC):
    """An environment, ready to play."""

    size: int | None = None  # prompts of an epoch of the train split; None: no prompt comes back
    probes: int | None = None  # those of the probe split
    grouped: bool = False  # must the episodes of one prompt be played in one call?

    @abstractmethod
    async def play(self, index: int, split: str, base_urls: Sequence[str]) -> list[Played]:
        """One episode of prompt `index` for each base URL, all at the same time."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Let go of what the environment holds."""


def option(settings: argparse.Namespace, name: str, default: Any) -> Any:
    """One argument of the adapter."""
    return settings.settings.get(name, default)


def load_named(target: str) -> Any:
    """What `path/file.py:NAME` or `package.module:NAME` names. Raises Refused, or what the module raises."""
    where, _, name = target.rpartition(":")
    if not where.endswith(".py"):
        module = importlib.import_module(where)
    else:
        path = Path(where).resolve()
        specification = importlib.util.spec_from_file_location(path.stem, path)
        if specification is None or specification.loader is None or not path.is_file():
            raise Refused(f"environment: no file {where}; allowed: path/file.py:NAME")
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module  # for classes that ask for their module
        sys.path.insert(0, str(path.parent))  # for files beside it
        specification.loader.exec_module(module)
    if not callable(named := getattr(module, name, None)):
        raise Refused(f"environment: {where} has no {name!r}; allowed: path/file.py:NAME of a function or class")
    return named


def described(error: BaseException) -> str:
    """The exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")[:300]
