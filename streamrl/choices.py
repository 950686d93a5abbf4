"""A choice of the configuration: built in and known by its name, or the user's own and known by its path.

Every kind of choice (an order of consumption, a loss, a transport, ...) is a folder in which each built-in choice is
one file: the file's name is the choice's name. So a choice is added by adding a file, or, outside of streamrl, by
naming a class: `package.module:Class` or `path/file.py:Class`. A built-in choice may be given by its path, too:
`streamrl.replay.orders.fifo:Fifo` is `fifo`.

    ORDERS.load("fifo")          ORDERS.load("mine.py:NewestFirst")

The class that is loaded is the choice's declaration: everything that other parts need to know about it. They ask it,
and compare no names. It must be quick to import, because every process of a run imports it; what needs torch or a
server is imported by the declaration's methods.

A key of the configuration that holds a choice is `order: Annotated[str, ORDERS]`; options that only one class knows
are beside it, in `order_options`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from zlib import crc32

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_PATH = re.compile(r"([\w./-]+|/[^:\n]+\.py):[A-Za-z_]\w*")

PATHS = "package.module:Class or path/file.py:Class"


class Options(BaseModel):
    """The options of one choice: fields with a description, as in the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Choice:
    """What every declaration has; each kind adds what its own users need to know."""

    Options: ClassVar[type[Options]] = Options  # what the key KEY_options may hold, checked with the configuration
    uses: ClassVar[frozenset[str]] = frozenset()  # keys of its section that not every choice of its kind has a use for

    @classmethod
    def check(cls, section: Any) -> None:
        """Raise ValueError where other keys of `section` do not fit: one line, which begins with the key."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of choice.

    >>> ORDERS.names
    ('fifo', 'ready', 'synchronous', 'windowed')
    """

    key: str  # of the configuration, for messages
    package: str  # each of its modules is one built-in choice, but for `base` and those that begin with _
    base: str  # module:Class that every choice of this kind is a subclass of
    hosted: bool = False  # a class of the user's is not loaded where the configuration is checked
    without: tuple[str, ...] = ()  # modules of the package that are no choice of this key
    refused: tuple[tuple[str, str], ...] = ()  # names that other trainers have and streamrl has not, and why

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in choices, sorted; none of them is imported."""
        return tuple(n for n in _modules_of(self.package, self.base.partition(":")[0]) if n not in self.without)

    @property
    def allowed(self) -> str:
        """What a key of this kind accepts, in words."""
        return f"one of {', '.join(self.names)}, {PATHS}"

    def load(self, name: str) -> Any:
        """The declaration that is called so, or is at that path: a class. Raises ValueError with one line."""
        return _own(self, name) if ":" in name else _built_in(self, name)

    def is_built_in(self, name: str) -> bool:
        """Is this a built-in choice, by its name or by its path? Nothing is imported."""
        return ":" not in name or name.rpartition(":")[0].rpartition(".")[0] == self.package

    def users_of(self, key: str) -> tuple[str, ...]:
        """The built-in choices that have a use for a key of their section."""
        return tuple(name for name in self.names if key in self.load(name).uses)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The built-in names, or what looks like a path; null where the key may leave it open."""
        own = {"type": "string", "pattern": f"^(?:{_PATH.pattern})$", "description": PATHS}
        leaves_open = {"type": "null"} in handler(core).get("anyOf", [])
        return {"anyOf": [{"enum": list(self.names)}, own, *([{"type": "null"}] if leaves_open else [])]}

    def _checked(self, name: str | None) -> str | None:
        try:
            if name is None:  # the key leaves it open
                return None
            if self.hosted and ":" in name and _PATH.fullmatch(name):
                return name
            self.load(name)
        except ValueError as error:
            raise PydanticCustomError("choice", "{line}", {"line": str(error), "key": self.key}) from error
        return name


def kind_in(metadata: Iterable[Any]) -> Kind | None:
    """The kind that a field's metadata names."""
    return next((each for each in metadata if isinstance(each, Kind)), None)


@cache
def _modules_of(package: str, base: str) -> tuple[str, ...]:
    folder = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(folder))
    return tuple(sorted(name for name in names if not name.startswith("_") and f"{package}.{name}" != base))


@cache
def _built_in(kind: Kind, name: str) -> type[Any]:
    if name not in kind.names:
        if (reason := dict(kind.refused).get(name)) is not None:
            raise ValueError(f"{kind.key}: {name} is not allowed: {reason}; allowed: {kind.allowed}")
        near = difflib.get_close_matches(name, kind.names, n=1, cutoff=0.5)
        hint = f"; nearest known value: {near[0]}" if near else ""
        raise ValueError(f"{kind.key}: {name} is not allowed; allowed: {kind.allowed}{hint}")
    module = importlib.import_module(f"{kind.package}.{name}")
    return next(_declarations(module, _named(kind.base)))


def _own(kind: Kind, path: str) -> type[Any]:
    base = _named(kind.base)
    try:
        found = _named(path)
    except Exception as error:  # whatever a module of the user's raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{kind.key}: {path} cannot be loaded: {reason}") from error
    if isinstance(found, type) and hasattr(found, "as_choice"):  # a class of another interface has its choice
        found = found.as_choice()
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{kind.key}: {path} is no subclass of {base.__module__}.{base.__qualname__}")
    return found


def _declarations(module: ModuleType, base: type) -> Iterator[type[Any]]:
    for member in vars(module).values():
        if isinstance(member, type) and issubclass(member, base) and member.__module__ == module.__name__:
            yield member


def _named(path: str) -> Any:
    where, _, name = path.rpartition(":")
    module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, name):
        raise ValueError(f"{where} has no class {name!r}")
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """The module of a file, loaded once; its folder is importable, as it is for a script."""
    return _load_file(path.resolve())


@cache
def _load_file(path: Path) -> ModuleType:
    name, former = path.stem, sys.modules.get(path.stem)
    if former is not None:
        if Path(getattr(former, "__file__", None) or "").resolve() == path:
            return former
        name = f"{path.stem}_{crc32(bytes(path)):08x}"  # another module is called so
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


ORDERS = Kind("replay.order", "streamrl.replay.orders", "streamrl.replay.orders.base:Order")
CURRICULA = Kind("replay.curriculum", "streamrl.replay.curricula", "streamrl.replay.curricula.base:Curriculum")
RELEASES = Kind("replay.release", "streamrl.replay.releases", "streamrl.replay.releases.base:Release")
CONTROLLERS = Kind(
    "replay.adaptive.controller", "streamrl.replay.controllers", "streamrl.replay.controllers.base:Controller"
)
TRANSPORTS = Kind("publish.transport", "streamrl.publish.transports", "streamrl.publish.transports.base:Transport")
ENGINES = Kind("evaluate.engine", "streamrl.generate.engines", "streamrl.generate.engines.base:Engine")
TRAINED_ENGINES = replace(ENGINES, key="generate.engine")
JUDGES = replace(ENGINES, key="task.args.engine")
LOSSES = Kind("algo.loss", "streamrl.algo.families", "streamrl.algo.families.base:Family")
WEIGHTS = Kind("algo.weight", "streamrl.algo.weights", "streamrl.algo.weights.base:ImportanceWeight")
MASKS = Kind("algo.mask", "streamrl.algo.masks", "streamrl.algo.masks.base:Mask")
REGULARISERS = Kind("algo.covariance", "streamrl.algo.regularisers", "streamrl.algo.regularisers.base:Regulariser")
PROXIMALS = Kind("algo.proximal", "streamrl.algo.proximals", "streamrl.algo.proximals.base:Proximal")
DIVERGENCES = Kind("algo.kl_estimator", "streamrl.algo.divergences", "streamrl.algo.divergences.base:Divergence")
REWARD_DIVERGENCES = replace(
    DIVERGENCES,
    key="algo.kl_reward_estimator",
    without=("full",),
    refused=(("full", "the reward is of tokens that were drawn, whose whole distribution nobody recorded"),),
)
AGGREGATIONS = Kind("algo.aggregation", "streamrl.algo.aggregations", "streamrl.algo.aggregations.base:Aggregation")
BASELINES = Kind(
    "algo.advantage.baseline",
    "streamrl.algo.baselines",
    "streamrl.algo.baselines.base:Baseline",
    refused=(
        ("remax", "it needs a greedy answer to every prompt beside the drawn ones, which no group has"),
        ("reinforce_plus_plus", "it compares the answers of a whole step, and a group is all that a baseline sees"),
    ),
)
FAMILIES = Kind("model.family", "streamrl.learner.families", "streamrl.learner.families.base:ModelFamily")
TASKS = Kind("task.name", "streamrl.tasks.built_in", "streamrl.tasks.environment:Environment", hosted=True)
TOOLS = Kind("task.args.tools", "streamrl.tasks.tools", "streamrl.tasks.tools.base:Tool")
REWARDS = Kind("task.rewards.name", "streamrl.tasks.rewards", "streamrl.tasks.rewards.base:Reward")
TOOL_PARSERS = Kind("task.tool_parser", "streamrl.tasks.tool_parsers", "streamrl.tasks.tool_parsers.base:ToolParser")
REASONING_PARSERS = Kind(
    "task.reasoning_parser",
    "streamrl.tasks.reasoning_parsers",
    "streamrl.tasks.reasoning_parsers.base:ReasoningParser",
)
SINKS = Kind("observe.sink", "streamrl.observe.sinks", "streamrl.observe.sinks.base:Sink")

ALGORITHM = (LOSSES, WEIGHTS, MASKS, REGULARISERS, PROXIMALS, DIVERGENCES, REWARD_DIVERGENCES, AGGREGATIONS, BASELINES)
OF_TASKS = (TASKS, TOOLS, REWARDS, TOOL_PARSERS, REASONING_PARSERS)
OF_REPLAY = (ORDERS, CURRICULA, RELEASES, CONTROLLERS)
KINDS = (*OF_REPLAY, TRANSPORTS, ENGINES, TRAINED_ENGINES, *ALGORITHM, FAMILIES, *OF_TASKS, SINKS)
