"""Where a run's files are, whatever folder a command is started in: the record of a run has absolute paths alone.

    runs/quick, models/tiny, data/sums.jsonl  ──absolute, when the run is made──▶  /home/me/models/tiny, ...

A relative path on a command line or in a configuration is meant from the folder in which the command is started. A
record from before there were absolute paths is read from the folder that its run lies in: where RUN is
/home/me/runs/quick and the record says `runs`, `models/tiny` is /home/me/models/tiny.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.section import Section
from streamrl.config.sft import SftDataConfig
from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.arguments import OnDisk, Place, placed
from streamrl.tasks.registry import placed_arguments, placed_name

# In a run folder: its whole configuration.
RECORD = "config.yaml"

# What a run writes there, and is read again.
OF_RUN = frozenset({
    RECORD, "config.schema.json", "environment.json", "events.jsonl", "metrics.jsonl", "left_out.json", "run.json",
    "wandb.id", "checkpoints", "evaluations", "events", "inputs", "journal", "keys", "locks", "logs", "model",
    "quarantine", "rows", "weights",
})  # fmt: skip


def absolute(config: Config) -> Config:
    """The same configuration with absolute paths, relative ones being meant from the present folder."""
    return _placed(config, lambda path: Path(os.path.abspath(path)), tasks=True)


def load_run(run_folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, with absolute paths. Raises ConfigError as `load` does."""
    config = config_file.load(run_folder / RECORD, overrides)
    folder = config_file.load(run_folder / RECORD).run.folder if overrides else config.run.folder
    recorded, actual = _apart(folder, Path(os.path.abspath(run_folder)).parent)

    def place(path: Path) -> Path:
        if path.is_absolute() and (path.exists() or not path.is_relative_to(recorded)):
            return path
        moved = actual / path.relative_to(recorded) if path.is_relative_to(recorded) else Path(os.path.abspath(path))
        here = Path(os.path.abspath(path))
        return here if here.exists() and not moved.exists() else moved

    return _placed(config, place, tasks=recorded != actual or not folder.is_absolute())


def train_again(config: Config, run_folder: Path) -> str:
    """The command line that resumes a run, from any folder; the user's own modules are found from this one alone."""
    name = "sft" if config.trains_rows else "train"
    command = shlex.join([program(), name, str(Path(os.path.abspath(run_folder)) / RECORD)])
    return f"{from_here()}{command}" if _has_own_modules(config) else command


def from_here() -> str:
    """What goes before a command that is meant from the present folder."""
    return f"cd {shlex.quote(os.getcwd())} && "


def program() -> str:
    """How `streamrl` is called where this process was: by its name, or by its path where no shell finds it."""
    beside = Path(sys.executable).with_name("streamrl")
    return str(beside) if shutil.which("streamrl") is None and beside.exists() else "streamrl"


def _apart(recorded: Path, actual: Path) -> tuple[Path, Path]:
    """What is left of two paths of one folder without their common end.

    >>> _apart(Path("out/runs"), Path("/home/me/out/runs"))
    (PosixPath('.'), PosixPath('/home/me'))
    """
    while recorded.name and recorded.name == actual.name:
        recorded, actual = recorded.parent, actual.parent
    return recorded, actual


def _placed(config: Config, place: Place, *, tasks: bool) -> Config:
    found = _of_section(config, place, tasks=tasks)
    assert isinstance(found, Config)
    return found


def _of_section(section: Section, place: Place, *, tasks: bool) -> Section:
    """A copy with every path in it placed; in the arguments of tasks, too, where `tasks` says so."""
    changes: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path):
            changes[name] = place(value)
        elif isinstance(value, Section):
            changes[name] = _of_section(value, place, tasks=tasks)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            changes[name] = tuple(_of_section(each, place, tasks=tasks) for each in value)
    for name, _ in section.choices():
        changes[name] = placed_name(getattr(section, name), place)
        changes[f"{name}_options"] = placed(section.chosen(name).Options, getattr(section, f"{name}_options"), place)
    if isinstance(section, SftDataConfig):
        named = {key: getattr(section, key) for key in ("path", "test_path")}
        changes |= {key: OnDisk("data").placed(text, place) for key, text in named.items() if text is not None}
    if tasks and isinstance(section, TaskConfig | TaskShare):
        changes |= _of_task(section, place)
    return section.model_copy(update=changes)


def _of_task(share: TaskConfig | TaskShare, place: Place) -> dict[str, Any]:
    """Name and arguments of a task. One that cannot be read is left as it is: its builder says what is wrong."""
    try:
        return {"name": placed_name(share.name, place), "args": placed_arguments(share, place)}
    except ValueError:
        return {}


def _has_own_modules(config: Config) -> bool:
    shares = (*config.task.shares, *config.evaluate.tasks)
    names = [*chosen(config), *(share.name for share in shares)]
    names += [value for share in shares for value in share.args.values() if isinstance(value, str)]
    return any(_is_module(name) for name in names)


def chosen(section: Section) -> Iterator[str]:
    """What every key that holds a choice says."""
    yield from (getattr(section, key) for key, _ in section.choices())
    for name in type(section).model_fields:
        if isinstance(value := getattr(section, name), Section):
            yield from chosen(value)


def _is_module(name: str) -> bool:
    """Example: `my_tasks.sums:Sums`, and not `/home/me/my_tasks.py:Sums`."""
    module, separator, attribute = name.partition(":")
    own = bool(separator) and not name.startswith("streamrl.")
    return own and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def run_folder_of(path: Path) -> Path:
    """`path`, where it is a run folder. Raises ConfigError."""
    if not (path / RECORD).is_file():
        raise ConfigError(f"{path}: no run folder (config.yaml is missing); allowed: a folder that `train` made")
    return path


def run_that_wrote(file: Path) -> Path | None:
    """The run folder of which a file that is there is a part."""
    actual = file.resolve()
    for folder in actual.parents:
        if (folder / RECORD).is_file() and any((folder / name).exists() for name in ("journal", "metrics.jsonl")):
            return folder if actual.relative_to(folder).parts[0] in OF_RUN else None
    return None


def set_aside(folder: Path) -> None:
    """Keep a folder under the next free name, NAME.1, NAME.2."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
