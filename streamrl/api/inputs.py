"""What a call of `streamrl.train` brings along as Python objects, as files of the run: RUN/inputs.

    rows, a datasets.Dataset ──▶ data.jsonl, data.parquet
    functions, classes       ──▶ task.py, which names each by its file, or takes it from functions.pkl

A function that is in a file of its own, outside of `__main__`, is loaded from that file, by every process of a
worker. One of a notebook, of the script itself, or within another function is pickled by value (cloudpickle).
"""

from __future__ import annotations

import hashlib
import json
import os
import pprint
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.tasks.functions.loading import PICKLED
from streamrl.tasks.functions.rewards import RewardFunction, name_of
from streamrl.tasks.functions.task import NUMBER
from streamrl.whole_files import drafted, write_whole

if TYPE_CHECKING:
    import datasets

FOLDER = "inputs"  # in the run folder
TASK, FUNCTIONS = "task.py", "functions" + PICKLED
DIGESTS = "digests.json"
BY_VALUE = " by value"  # in the name of a Dataset's digest: runs of before have another one, of its rows' text

BATCH = 100  # rows that are read at a time

Data: TypeAlias = "Sequence[Mapping[str, Any]] | datasets.Dataset"


class Inputs:
    """The data and the functions of one run."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where they will be, RUN/inputs."""
        self._folder = folder
        self._data: dict[str, bytes | datasets.Dataset] = {}  # by the name of the file
        self._pickled: dict[str, Any] = {}
        self._folders: list[str] = _import_folders()
        self._task = ""

    def add_data(self, key: str, data: Data, *, numbered: bool) -> str:
        """Take rows along. Returns the path that they will have. Raises ConfigError for what are none.

        key: the argument that they were given as. numbered: rows with the same prompt are different questions.
        """
        if not isinstance(data, Sequence):
            if not (hasattr(data, "to_parquet") and hasattr(data, "add_column") and hasattr(data, "__len__")):
                raise ConfigError(
                    f"{key}: a value of type {type(data).__name__} is not allowed; allowed: a list of rows, or a "
                    "datasets.Dataset, which is one split and has a length"
                )
            found = data.add_column(NUMBER, list(range(len(data)))) if numbered else data
            name = f"{key}.parquet"
            self._data[name] = found
        else:
            name = f"{key}.jsonl"
            self._data[name] = _lines(key, data, numbered)
        return str(self._folder / name)

    def set_task(
        self,
        rewards: Sequence[RewardFunction],
        tools: Sequence[Callable[..., Any]],
        environment: Callable[[], Any] | None,
    ) -> str:
        """Take functions along. Returns the name of the task that they make."""
        given = {
            "rewards": [(self._place("reward", each.function), each.weight) for each in rewards],
            "tools": [self._place("tool", each) for each in tools],
            "environment": None if environment is None else self._place("environment", environment),
        }
        arguments = "".join(f"    {key}={pprint.pformat(value, width=100)},\n" for key, value in given.items() if value)
        self._task = (
            '"""The task of this run, written by `streamrl.train`: where its functions are."""\n\n'
            "import sys\n\n"
            "from streamrl.tasks.functions.loading import task_of\n\n"
            f"sys.path += [folder for folder in {self._folders!r} if folder not in sys.path]\n\n"
            f"Task = task_of(\n    __file__,\n{arguments})\n"
        )
        return f"{self._folder / TASK}:Task"

    def write(self, folder: Path) -> None:
        """Write all files, each whole or not at all. Raises ConfigError where the disk does not take them."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in self._data.items():
                with drafted(folder / name) as draft:
                    draft.write_bytes(data) if isinstance(data, bytes) else data.to_parquet(draft)
            if self._pickled:
                write_whole(folder / FUNCTIONS, _pickle(self._pickled))
            if self._task:
                write_whole(folder / TASK, self._task)
            write_whole(folder / DIGESTS, json.dumps(self._digests()))
        except OSError as error:
            raise ConfigError(
                f"run.folder: {folder}: {error.strerror or error}; allowed: a folder that can be written"
            ) from None

    def check(self, folder: Path) -> None:
        """Raise ConfigError where the run in that folder was started with other rows. Functions may have changed."""
        if not (folder / DIGESTS).exists():
            return
        try:
            known = json.loads((folder / DIGESTS).read_text())
        except ValueError:
            raise ConfigError(
                f"run.name: {folder / DIGESTS} is damaged; allowed: the same call without that file, fresh=True, or "
                "another name"
            ) from None
        for name, digest in self._digests().items():
            if known.get(name, digest) != digest:
                raise ConfigError(
                    f"{Path(name).stem}: its rows are not those that the run in {folder.parent} was started with; "
                    "allowed: the same rows, fresh=True, or another name"
                )

    def placed(self, config: Config, folder: Path) -> Config:
        """The same configuration, with the files in another folder."""
        task = config.task
        here = {
            "name": self._moved(task.name, folder),
            "args": {k: self._moved(v, folder) for k, v in task.args.items()},
        }
        return config.model_copy(update={"task": task.model_copy(update=here)})

    def _moved(self, value: Any, folder: Path) -> Any:
        return value.replace(str(self._folder), str(folder), 1) if isinstance(value, str) else value

    def _place(self, kind: str, function: Callable[..., Any]) -> str:
        """By its file where it has one of its own, and else by value."""
        name = name_of(function)
        if (where := _own_place(function)) is not None:
            if (folder := _import_folder(where)) is not None and folder not in self._folders:
                self._folders.append(folder)
            print(f"streamrl: {kind} {name}: loaded from {where}", file=sys.stderr)
            return where
        while name in self._pickled:
            name += "_"
        self._pickled[name] = function
        print(f"streamrl: {kind} {name}: pickled by value into {self._folder / FUNCTIONS}", file=sys.stderr)
        return f"{FUNCTIONS}:{name}"

    def _digests(self) -> dict[str, str]:
        return {
            name if isinstance(data, bytes) else name + BY_VALUE: _digest(data) for name, data in self._data.items()
        }


def _lines(key: str, rows: Iterable[Mapping[str, Any]], numbered: bool) -> bytes:
    """JSON lines. Raises ConfigError for a row that is none, with its place."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ConfigError(f'{key}[{number}]: {str(row)[:80]} is not allowed; allowed: a mapping with "prompt"')
        try:
            lines.append(json.dumps({**row, NUMBER: number} if numbered else dict(row), allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}[{number}]: {error}; allowed: values of JSON, or a datasets.Dataset") from None
    if not lines:
        raise ConfigError(f"{key}: it has no rows; allowed: at least two")
    return "".join(lines).encode()


def _digest(data: bytes | datasets.Dataset) -> str:
    """Of the rows themselves: what a library makes of them in a file differs from version to version."""
    found = hashlib.blake2b(digest_size=16)
    if isinstance(data, bytes):
        found.update(data)
    else:
        for batch in data.with_format("arrow").iter(BATCH):  # images and audio as their bytes, arrays whole
            for row in batch.to_pylist():
                found.update(repr(row).encode())
    return found.hexdigest()


def _own_place(function: Any) -> str | None:
    """`file.py:NAME`, or `package.module:NAME`, where importing that gives the function; None for any other."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if not name.isidentifier() or module is None or module.__name__ == "__main__":
        return None
    if getattr(module, name, None) is not function:
        return None
    if module.__name__.partition(".")[2] or hasattr(module, "__path__"):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None) or ""
    return f"{os.path.abspath(file)}:{name}" if file.endswith(".py") else None


def _import_folders() -> list[str]:
    """Where the calling program finds its own modules: beside its script, and in the present folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [os.getcwd(), *([os.path.dirname(os.path.abspath(script))] if script else [])]
    return list(dict.fromkeys(folders))


def _import_folder(where: str) -> str | None:
    """The folder in which the package of `package.module:NAME` was found; None for a file, and without one."""
    package = sys.modules.get(where.partition(":")[0].partition(".")[0])
    found = getattr(package, "__path__", None)
    return os.path.dirname(os.path.abspath(next(iter(found)))) if found else None


def _pickle(functions: Mapping[str, Any]) -> bytes:
    """Raises ConfigError for a function that holds what cannot be pickled."""
    import cloudpickle

    for name, function in functions.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # whatever an object that the function refers to raises
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{name}: it cannot be pickled ({reason}); allowed: a function in a file of its own"
            ) from None
    pickled: bytes = cloudpickle.dumps(dict(functions))
    return pickled
