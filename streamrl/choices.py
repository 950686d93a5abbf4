"""A choice of the configuration: built in and known by its name, or the user's own and known by its path.

Every kind of choice (an order of consumption, a loss, a transport, ...) is a folder in which each built-in choice is
one file: the file's name is the choice's name. So a choice is added by adding a file, or, outside of streamrl, by
naming a class: `package.module:Class` or `path/file.py:Class`. A built-in choice may be given by its path, too:
`streamrl.replay.orders.fifo:Fifo` is `fifo`.

    ORDERS = Kind("replay.order", package="streamrl.replay.orders", base="streamrl.replay.orders.base:Order")
    ORDERS.load("fifo")          ORDERS.load("mine.py:NewestFirst")

The class that is loaded is the choice's declaration: everything that other parts need to know about it. They ask it,
and compare no names. It must be quick to import, because every process of a run imports it; what needs torch or a
server is imported by the declaration's methods.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from streamrl.config.section import Section


class NoOptions(Section):
    """A choice without options of its own."""


class Choice:
    """What every declaration has; each kind adds what its own users need to know."""

    Options: ClassVar[type[Section]] = NoOptions  # what the key KEY_options may hold, checked with the configuration
    uses: ClassVar[frozenset[str]] = frozenset()  # keys of the same section that have an effect only with this choice


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of choice.

    >>> ORDERS.names
    ('fifo', 'ready', 'synchronous', 'windowed')
    """

    key: str  # of the configuration, for messages
    package: str  # each of its modules is one built-in choice, but for `base` and those that begin with _
    base: str  # module:Class that every choice of this kind is a subclass of

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in choices, sorted; none of them is imported."""
        return _modules_of(self.package, self.base.partition(":")[0])

    def load(self, name: str) -> type[Any]:
        """The declaration that is called so, or stands at that path. Raises ValueError with one line."""
        return _load(self, name)

    def name_of(self, declaration: type[Any]) -> str:
        """The name of a built-in declaration, the path of any other one."""
        package, _, module = declaration.__module__.rpartition(".")
        built_in = package == self.package and module in self.names
        return module if built_in else f"{declaration.__module__}:{declaration.__qualname__}"


@cache
def _modules_of(package: str, base: str) -> tuple[str, ...]:
    folder = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(folder))
    return tuple(sorted(name for name in names if not name.startswith("_") and f"{package}.{name}" != base))


@cache
def _load(kind: Kind, name: str) -> type[Any]:
    base = _named(kind.base)
    if ":" not in name:
        if name not in kind.names:
            raise ValueError(_not_among(kind, name))
        module = importlib.import_module(f"{kind.package}.{name}")
        return next(_declarations(module, base))
    try:
        found = _named(name)
    except Exception as error:  # whatever a module of the user's raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{kind.key}: {name} cannot be loaded: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{kind.key}: {name} is no subclass of {base.__module__}.{base.__qualname__}")
    return found


def _declarations(module: ModuleType, base: type) -> Iterator[type[Any]]:
    for member in vars(module).values():
        if isinstance(member, type) and issubclass(member, base) and member.__module__ == module.__name__:
            yield member


def _named(path: str) -> Any:
    where, _, name = path.rpartition(":")
    module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name}")
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """The module of a file, loaded once; its folder is importable, as it is for a script."""
    return _load_file(path.resolve())


@cache
def _load_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)
    specification.loader.exec_module(module)
    return module


def _not_among(kind: Kind, name: str) -> str:
    near = difflib.get_close_matches(name, kind.names, n=1, cutoff=0.5)
    hint = f"; nearest known value: {near[0]}" if near else ""
    names = ", ".join(kind.names)
    return f"{kind.key}: {name!r} is not allowed; allowed: {names}, package.module:Class or path/file.py:Class{hint}"
