"""Megatron-Core's import on a machine without CUDA, without what takes seconds of every start and is not used.

- torch's compiler: Megatron decorates dozens of functions with `jit_fuser` when it is imported, and torch loads Dynamo
  and Inductor for that. The layers of a CPU call none of them. Here each is compiled at its first call.
- wandb: Megatron's own inference engine, which is not used here, imports it where it is installed.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from streamrl.engine.hardware import has_cuda

COMPILES = "megatron.core.jit"
IMPORT_WANDB = ("megatron.core.inference.contexts.dynamic_context", "megatron.core.timers")

Function = Callable[..., Any]


def lighten() -> None:
    """Have what follows load less. Call it before Megatron is imported; where there is CUDA it changes nothing."""
    if not has_cuda() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def deferred(compile_function: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A decorator as `compile_function`, which is called with the function when that is called for the first time."""

    def decorate(function: Function) -> Function:
        compiled = functools.cache(lambda: compile_function(function))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    return decorate


class _Finder(importlib.abc.MetaPathFinder):
    """Finds some modules where they are, and has `_Loader` load them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != COMPILES and name not in IMPORT_WANDB:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        modules: dict[str, Any] = sys.modules
        hidden = module.__name__ in IMPORT_WANDB and "wandb" not in modules
        if hidden:
            modules["wandb"] = None  # an import of it fails as where it is not installed
        try:
            self._loader.exec_module(module)
        finally:
            if hidden:
                del modules["wandb"]
        if module.__name__ == COMPILES:
            module.jit_fuser = deferred(module.jit_fuser)  # type: ignore[attr-defined]
