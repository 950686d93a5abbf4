"""Task names and the environments behind them: those of streamrl by a word, those of the user by a path."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from streamrl.choices import TASKS
from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.arguments import (
    OF_THE_HUB,
    OnDisk,
    Place,
    TaskArguments,
    is_data_file,
    parse_arguments,
    placed,
)
from streamrl.tasks.environment import Around, Environment
from streamrl.tasks.failures import describe

# The argument of tasks whose prompts can all be held out.
_EVALUATION = "evaluation_only"


def build_task(config: TaskConfig | TaskShare, seed: int, split: str, own: Environment | None = None) -> Environment:
    """The environment of `config`. No prompt of the probe split occurs in the train split of the same task.

    split: "train" or "probe". `own` replaces the class of the user's that `config`, or the task inside it, names by
    a path; None: it is loaded.

    Raises ValueError, with one line that begins with the key: `task.args.KEY` for arguments that do not fit,
    `task.name` for a class of the user's that cannot be loaded.
    """
    if own is not None and not TASKS.is_built_in(config.name):
        return own
    task = TASKS.load(config.name)
    arguments = parse_arguments(_model(task), _given(config, task))
    given: tuple[Any, ...] = (arguments, seed, split)
    if issubclass(task, Around):
        inner: TaskShare | None = arguments.task
        given = (arguments, inner and build_task(inner, seed, split, own), seed, split)
    try:
        return task(*given)
    except ValueError:
        raise
    except Exception as error:  # whatever a class of the user's raises
        raise ValueError(f"task.name: {config.name} cannot be made: {describe(error)}") from error


def check_arguments(config: TaskConfig | TaskShare) -> None:
    """Check the arguments of a built-in task, and of one inside it, without building them; a class of the user's is
    only loaded in a process of its own, and is left alone. Raises ConfigError.
    """
    if not TASKS.is_built_in(config.name):
        return
    task = TASKS.load(config.name)
    arguments = parse_arguments(task.Arguments, _given(config, task))
    if issubclass(task, Around) and (inner := arguments.task) is not None:
        check_arguments(inner)


def own_share(config: TaskConfig | TaskShare) -> TaskShare | None:
    """The task in it that is a class of the user's, named by a path; None where there is none.

    >>> own_share(TaskShare(name="agent", args={"task": {"name": "mine.py:Mine"}})).name
    'mine.py:Mine'
    """
    if not TASKS.is_built_in(config.name):
        return TaskShare(name=config.name, args=config.args)
    if not issubclass(TASKS.load(config.name), Around):
        return None
    try:
        return own_share(TaskShare.model_validate(config.args.get("task")))
    except ValidationError:  # nothing, or what `build_task` refuses
        return None


def arguments_of(name: str) -> type[TaskArguments]:
    """What the `task.args` of a task are checked against. Raises ValueError for a class that cannot be loaded."""
    return _model(TASKS.load(name))


def placed_name(name: str, place: Place) -> str:
    """The name of a task, with an absolute path where it names a class in a file."""
    return OnDisk("code").placed(name, place)


def placed_arguments(share: TaskConfig | TaskShare, place: Place) -> dict[str, Any]:
    """The arguments of a task, with absolute paths; those of a task inside it, too.

    Raises ValueError for a class that cannot be loaded.
    """
    found = placed(arguments_of(share.name), share.args, place)
    inner = found.get("task")
    if isinstance(inner, dict) and isinstance(name := inner.get("name"), str):
        args = inner.get("args") or {}
        within = placed_arguments(TaskShare.model_construct(name=name, args=args), place)
        found["task"] = {**inner, "name": placed_name(name, place)} | ({"args": within} if args else {})
    return found


def _model(task: type[Environment]) -> type[Any]:
    """Raises ValueError for a class of the user's with arguments of another kind, such as a dataclass."""
    if not (isinstance(task.Arguments, type) and issubclass(task.Arguments, BaseModel)):
        raise ValueError(
            f"task.name: {task.__name__}.Arguments is no model; allowed: a subclass of "
            f"{TaskArguments.__module__}.TaskArguments"
        )
    return task.Arguments


def _given(config: TaskConfig | TaskShare, task: type[Environment]) -> dict[str, Any]:
    """The arguments that a configuration gives, over the task's own defaults."""
    whole = isinstance(config, TaskShare) and config.evaluation_only and _EVALUATION in task.Arguments.model_fields
    path = config.args.get("path", task.defaults.get("path"))
    is_file = isinstance(path, str) and is_data_file(path)
    defaults = {key: value for key, value in task.defaults.items() if not (is_file and key in OF_THE_HUB)}
    return {**defaults, **config.args} | ({_EVALUATION: True} if whole else {})
