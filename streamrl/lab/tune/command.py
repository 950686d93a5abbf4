"""`streamrl tune CONFIG|RUN [key=value ...]`: tune, and print the front, the choice and the command that trains it."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from streamrl.config import file as config_file
from streamrl.config.file import BASE, ConfigError, parse_yaml
from streamrl.lab.output import check_file
from streamrl.lab.simulate.command import WIDTH, print_model
from streamrl.lab.simulate.figures import Figures
from streamrl.lab.simulate.on_cores import RunEndedError
from streamrl.lab.tune.search import Found, Rule, limit
from streamrl.lab.tune.space import Setting, Space
from streamrl.lab.tune.tuned import Limits, Runs, Source, Tuned, tuned


def main(
    path: Path,
    overrides: Sequence[str],
    rule: Rule,
    limits: Limits,
    runs: Runs,
    *,
    output: Path | None = None,
    figures: Path | None = None,
) -> int:
    """Tune, print, and write. Returns 0, or 1 where a calibration run fails."""
    check_file("--output", output, (".yaml", ".yml"))
    check_file("--json", figures)
    source = Source.of(path, overrides)
    source.load()  # its files can be read
    for flag, file in (("--output", output), ("--json", figures)):
        _check_overwritten(flag, file, source)
    try:
        found = tuned(source, rule, limits, runs)
    except RunEndedError as failure:
        print(f"streamrl: {failure}", file=sys.stderr)
        return 1
    _print(source, found, rule)
    if output is not None:
        write(output, source, found.overrides(found.choice))
        print(f"written: {output}")
    if figures is not None:
        figures.write_text(json.dumps(as_json(found, rule), indent=1) + "\n")
    return 0


def _check_overwritten(flag: str, file: Path | None, source: Source) -> None:
    """Refuse a file that is read. Raises ConfigError."""
    if file is None or not file.exists():
        return
    own, *bases = files_of(source.path)
    if file.samefile(own):
        raise ConfigError(f"{flag}: {file} is the configuration that is tuned; allowed: another file")
    if any(file.samefile(base) for base in bases):
        raise ConfigError(f"{flag}: {file} is a base of {source.path}; allowed: another file")


def files_of(path: Path) -> list[Path]:
    """The files of a configuration, which can be read: itself, and all that it builds on."""
    found, left = [path], [path]
    while left:
        file = left.pop()
        bases = (parse_yaml(file.read_text(), where=file) or {}).get(BASE, [])
        for base in (file.parent / each for each in ([bases] if isinstance(bases, str) else bases)):
            if base not in found:
                found.append(base)
                left.append(base)
    return found


_COLUMNS: tuple[tuple[str, Callable[[Setting], Any]], ...] = (
    ("bound", lambda setting: f"{setting.bound:g}"),
    ("window", lambda setting: setting.window),
    ("in flight", lambda setting: setting.in_flight),
    ("every", lambda setting: setting.every),
    ("workers", lambda setting: setting.workers),
    ("ranks", lambda setting: setting.ranks),
    ("micro batch", lambda setting: setting.micro_batch),
)


def _print(source: Source, found: Tuned, rule: Rule) -> None:
    Console(width=WIDTH).print(_table(found))
    print_model(found.model)
    total = math.prod(found.space.sizes)
    ended = "" if found.searched.complete else "; ended by --points"
    if found.space.divided is not None:
        print(f"divided: {found.space.divided}")
    print(f"searched: {found.searched.simulated} of {total:,} settings{ended}")
    for note in found.notes:
        print(note)
    print(f"chosen: {rule}")
    print(shlex.join([*source.words, *found.overrides(found.choice)]))


def _table(found: Tuned) -> Table:
    table = Table(title="tokens/s against mean age: nothing is faster at its age; the choice is marked *")
    table.title_justify = "left"
    for column in ("", *(name for name, _ in _COLUMNS), "tokens/s", "mean age", "p95", "why"):
        table.add_column(column, justify="left" if column in ("", "why") else "right")
    if found.configured is not None:
        table.add_row("now", *_cells(found.space.configured, found.configured), limit(found.configured))
    before: Found | None = None
    for each in found.searched.front:
        mark = "*" if each is found.choice else ""
        table.add_row(mark, *_cells(found.setting(each), each.figures), reason(found.space, before, each))
        before = each
    return table


def _cells(setting: Setting, figure: Figures) -> list[str]:
    numbers = [f"{figure.sustained:,.0f}", f"{figure.staleness_mean:.2f}", f"{figure.staleness_p95:.1f}"]
    return [*(str(of(setting)) for _, of in _COLUMNS), *numbers]


def reason(space: Space, before: Found | None, each: Found) -> str:
    """What it gains over the next fresher point by which values, and what limits it."""
    if before is None:
        return f"the freshest; {limit(each.figures)}"
    gain = each.figures.sustained / before.figures.sustained - 1
    old, new = asdict(space.setting(before.point)), asdict(space.setting(each.point))
    changes = ", ".join(
        f"{name.replace('_', ' ')} {old[name]:g} to {new[name]:g}" for name in old if old[name] != new[name]
    )
    return f"{gain:+.1%}: {changes}; {limit(each.figures)}"


def write(output: Path, source: Source, overrides: Sequence[str]) -> None:
    """A configuration that builds on the source's, with the overrides of both.

    A mapping in an override takes the place of the source's, and one in a file is merged into that of its base: where
    that makes a difference the whole configuration is written.
    """
    meant = config_file.load(source.path, [*source.given, *overrides])
    output.write_text(as_file(source, overrides))
    try:
        is_meant = config_file.load(output) == meant
    except ConfigError:  # of what the file merges, and an override replaces
        is_meant = False
    if not is_meant:
        config_file.save(meant, output)


def as_file(source: Source, overrides: Sequence[str]) -> str:
    """What `write` tries first."""
    tree: dict[str, Any] = {"base": str(source.path.absolute())}
    for word in (*source.given, *overrides):
        key, _, text = word.partition("=")
        *parents, last = key.split(".")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = parse_yaml(text, where=key)
    return yaml.safe_dump(tree, sort_keys=False)


def as_json(found: Tuned, rule: Rule) -> dict[str, Any]:
    """Everything that is printed."""

    def row(each: Found) -> dict[str, Any]:
        overrides = list(found.overrides(each))
        figures = {"sustained": each.figures.sustained, **each.figures.as_json()}
        return {"overrides": overrides, **asdict(found.setting(each)), **figures}

    return {
        "rule": str(rule),
        "choice": row(found.choice),
        "front": [row(each) for each in found.searched.front],
        "configured": None if found.configured is None else found.configured.as_json(),
        "divided": None if found.space.divided is None else asdict(found.space.divided),
        "simulated": found.searched.simulated,
        "complete": found.searched.complete,
        "notes": found.notes,
    }
