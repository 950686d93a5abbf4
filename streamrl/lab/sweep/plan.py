"""The sweep file and what it means: points, each with settings, and one job for every point and seed.

base: ../quickstart.yaml                  relative to the sweep file
set: {publish.keep_every: 0}              of every point
grid: {replay.max_staleness: [0, 2, 8]}   every combination
points:                                   settings that go together; times the grid
  - {name: plain, algo.weight: none}
  - {name: weighted, algo.weight: token}
baseline: max_staleness_0-plain           what the others are compared with; the first point. Or `plain`, one of
                                          `points`: each with that of the same grid values
target: 0.8                               a reward; what it takes each point until then
columns: [reward, KL]                     figures in the tables, of those in results.json
ratios: [KL]                              figures whose ratios to the baseline are in a table as well
minutes: 10                               of a run, about: said beforehand, as long as no run has been timed
seeds: [1, 2, 3]
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.positions import OVERRIDE
from streamrl.lab.sweep.figures import COLUMNS, FIGURES
from streamrl.model_dtype import with_dtype

KEYS = (
    "name", "folder", "base", "set", "grid", "points", "baseline", "target", "columns", "ratios", "minutes", "seeds",
)  # fmt: skip

OWN = ("run.seed", "run.name", "run.folder")  # what the sweep itself gives to each run

LONGEST_NAME = 200  # letters of a point's, which is a part of a folder's

_NAME = re.compile(r"\w[\w.-]*")
_BARE = re.compile(r"[A-Za-z_./][\w./-]*")  # texts that YAML reads as themselves ...
_WORDS = ("true", "false", "null")  # ... but these


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of settings, without a seed.

    `column` is its value of the first grid key, `series` whatever else tells it from the others: the axes of the
    plots. Without a grid, `column` is the point's name and `series` is empty. `baseline` is the name of the point that
    it is compared with, its own where it is one.
    """

    name: str
    column: str
    series: str
    settings: dict[str, Any]
    baseline: str


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a point with a seed, and its whole configuration."""

    point: Point
    seed: int
    overrides: tuple[str, ...]  # of the base
    config: Config

    @property
    def name(self) -> str:
        return self.config.run.name


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file, read and checked."""

    name: str
    folder: Path  # of this sweep: its runs, figures and tables
    base: Path  # YAML file
    common: tuple[str, ...]  # key=value, of every point
    axis: str  # what `column` of a point is a value of: the first grid key, or "point"
    points: tuple[Point, ...]
    baseline: str  # the point that the others are compared with, or one of `points`, under the same grid values
    target: float | None  # a reward; None: tokens are not counted
    columns: tuple[str, ...]  # of the tables: names of figures
    ratios: tuple[str, ...]  # figures that are compared by their ratios to the baseline's
    minutes: float | None  # of a run, about; None: not known beforehand
    seeds: tuple[int, ...]

    def jobs(self, *, fresh: bool = False) -> list[Job]:
        """All runs. Every point comes once before any comes with its second seed: what there is after an hour can be
        compared. fresh: runs that are there say nothing of these ones. Raises ConfigError for a point that is no valid
        configuration.
        """
        return [self._job(point, seed, fresh) for seed in self.seeds for point in self.points]

    def _job(self, point: Point, seed: int, fresh: bool) -> Job:
        own = {"run.seed": seed, "run.name": f"{point.name}-seed{seed}", "run.folder": str(self.folder / "runs")}
        settings = [override(key, value) for key, value in {**point.settings, **own}.items()]
        overrides = (*self.common, *settings)
        try:
            config = config_file.load(self.base, overrides)
            if config.run.epochs is not None:
                raise ConfigError(f"run.epochs: {config.run.epochs:g} in a sweep; allowed: run.steps")
            return Job(point, seed, overrides, with_dtype(config, fresh=fresh))
        except ConfigError as error:
            lines = (line.removeprefix(OVERRIDE) for line in error.lines)  # most are settings of the point
            raise ConfigError("\n".join(f"point {point.name}: {line}" for line in lines)) from None


def read(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The sweep of `file`; `overrides` (key=value) hold for every point. Raises ConfigError with one line."""
    tree = _tree(file)
    name = _text(tree, "name", file.stem)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r} is no folder name; allowed: letters, digits, _ . -")
    grid, points = _grid(tree), _points(tree)
    common = _mapping(tree, "set")
    if both := _covering({key for point in points for key in point}, grid):
        raise ConfigError(f"points: {both[0]} is in `grid` as well; allowed: in one of them")
    swept = {key for settings in (grid, *points) for key in settings if key != "name"}
    given = {
        key: config_file.parse_yaml(value, where=key) for key, _, value in (text.partition("=") for text in overrides)
    }
    for place, keys in (("set", common), ("overrides", given)):
        if both := _covering(swept, keys):
            raise ConfigError(f"{place}: {both[0]} is swept over; allowed: keys that `grid` and `points` do not have")
    settings = (common, given, *points, *({key: value} for key, values in grid.items() for value in values))
    if own := sorted({leaf for each in settings for leaf in _leaves(each)} & set(OWN)):
        raise ConfigError(f"{own[0]}: the sweep gives it to each run; allowed: seeds, name and folder of the sweep")
    if "base" not in tree:
        raise ConfigError(f"{file}: base is missing; allowed: a configuration, relative to the sweep file")
    baseline = None if "baseline" not in tree else _text(tree, "baseline", "")
    expanded = tuple(_expand(grid, points, baseline))
    _check_baselines(expanded, points)
    return Sweep(
        name=name,
        folder=Path(_text(tree, "folder", "sweeps")) / name,
        base=_beside(file, _text(tree, "base", "")),
        common=(*(override(key, value) for key, value in common.items()), *overrides),
        axis=next(iter(grid), "point"),
        points=expanded,
        baseline=baseline or expanded[0].name,
        target=_number(tree, "target", "a reward, a number"),
        columns=_figures(tree, "columns", list(COLUMNS)),
        ratios=_figures(tree, "ratios", []),
        minutes=_number(tree, "minutes", "minutes of a run, a number > 0", above=0.0),
        seeds=_seeds(tree),
    )


def _leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """What is set, where a section is given as a whole too.

    >>> list(_leaves({"run": {"seed": 9, "wandb": {"mode": "offline"}}, "run.steps": 5}))
    ['run.seed', 'run.wandb.mode', 'run.steps']
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield f"{section}{key}"


def _covering(keys: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of `keys` that would set one of `others` too.

    >>> _covering(["replay", "publish.every"], ["replay.window", "publish.every", "algo.loss"])
    ['publish.every', 'replay']
    """
    return sorted(key for key in keys if any(f"{other}.".startswith(f"{key}.") for other in others))


def override(key: str, value: Any) -> str:
    """`key=value` as the command line takes it.

    >>> override("algo.weight", "none"), override("replay.max_staleness", 2), override("algo.mask_low", None)
    ('algo.weight=none', 'replay.max_staleness=2', 'algo.mask_low=null')
    """
    bare = isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS
    return f"{key}={value if bare else json.dumps(value)}"


def _expand(grid: Mapping[str, list[Any]], points: Sequence[dict[str, Any]], baseline: str | None) -> Iterator[Point]:
    """Every combination of the grid, with each of the points; the first is the baseline where None is given."""
    leaves = Counter(key.rpartition(".")[2] for key in grid)
    short = {key: leaf if leaves[leaf := key.rpartition(".")[2]] == 1 else key for key in grid}
    seen: set[str] = set()
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        words = [f"{short[key]}_{_short(value)}" for key, value in chosen.items()]
        for point in points or [{}]:
            own = [point["name"]] if point else []
            name = _joined([*words, *own])
            baseline = name if baseline is None else baseline
            if len(name) > LONGEST_NAME:
                raise ConfigError(
                    f"grid: a point is called {name[:40]}..., {len(name)} letters; allowed: up to {LONGEST_NAME}, or "
                    "points, which have names of their own"
                )
            if name in seen:
                raise ConfigError(f"grid: two points are called {name}; allowed: values and names that differ")
            seen.add(name)
            settings = chosen | {key: value for key, value in point.items() if key != "name"}
            other = _joined([*words, baseline]) if any(each["name"] == baseline for each in points) else baseline
            if grid:
                others = [word.replace("_", " ") for word in words[1:]]
                yield Point(name, _short(values[0]), ", ".join([*own, *others]), settings, other)
            else:
                yield Point(name, name, "", settings, other)


def _joined(words: Sequence[str]) -> str:
    """A point's name, which is one of a folder as well."""
    return re.sub(r"[^\w.-]+", "_", "-".join(words)) or "base"


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = config_file.parse_yaml(file.read_text(), where=file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{file}: {reason}; allowed: a sweep file, such as those in configs/experiments") from None
    if not isinstance(tree, dict) or not tree.keys() <= set(KEYS):
        odd = next((str(key) for key in tree if key not in KEYS), "") if isinstance(tree, dict) else "no mapping"
        raise ConfigError(f"{file}: {odd}: no key of a sweep file; allowed: {', '.join(KEYS)}")
    return tree


def _text(tree: Mapping[str, Any], key: str, default: str) -> str:
    value = tree.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {value!r} is not allowed; allowed: text")
    return value


def _mapping(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key}: {value!r} is not allowed; allowed: a mapping of configuration keys")
    return value


def _grid(tree: Mapping[str, Any]) -> dict[str, list[Any]]:
    grid = _mapping(tree, "grid")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{key}: {values!r} is not allowed; allowed: a list of values")
    return grid


def _points(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    points = tree.get("points") or []
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ConfigError(f"points: {points!r} is not allowed; allowed: a list of mappings, each with a name")
    for place, point in enumerate(points):
        if not isinstance(point.get("name"), str):
            raise ConfigError(f"points[{place}]: its name is missing; allowed: name and configuration keys")
    return points


def _check_baselines(expanded: Sequence[Point], points: Sequence[dict[str, Any]]) -> None:
    names = [point.name for point in expanded]
    if unknown := [point.baseline for point in expanded if point.baseline not in names]:
        allowed = dict.fromkeys([*names, *(point["name"] for point in points)])
        raise ConfigError(f"baseline: {unknown[0]} is no point; allowed: {', '.join(allowed)}")


def _number(tree: Mapping[str, Any], key: str, allowed: str, *, above: float = -math.inf) -> float | None:
    value = tree.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        raise ConfigError(f"{key}: {value!r} is not allowed; allowed: {allowed}")
    return float(value)


def _figures(tree: Mapping[str, Any], key: str, default: list[str]) -> tuple[str, ...]:
    figures, names = tree.get(key, default), [figure.name for figure in FIGURES]
    if not isinstance(figures, list) or (default and not figures) or len(set(map(str, figures))) < len(figures):
        raise ConfigError(f"{key}: {figures!r} is not allowed; allowed: a list of different figures")
    if unknown := [name for name in figures if name not in names]:
        raise ConfigError(f"{key}: {unknown[0]!r} is no figure; allowed: {', '.join(names)}")
    return tuple(figures)


def _seeds(tree: Mapping[str, Any]) -> tuple[int, ...]:
    seeds = tree.get("seeds", [1])
    whole = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds: {seeds!r} is not allowed; allowed: a list of different whole numbers >= 0")
    return tuple(seeds)


def _beside(file: Path, base: str) -> Path:
    """`base` as seen from the folder of the sweep file, without the `..` in the middle."""
    path = (file.parent / base).resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
