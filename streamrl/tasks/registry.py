"""Task names and the environments behind them: those of streamrl by a word, those of the user by a path."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from pydantic import ValidationError

from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.arguments import OnDisk, Place, TaskArguments, parse_arguments, placed
from streamrl.tasks.environment import Environment
from streamrl.tasks.named import load_named

AROUND = ("tools", "remote", "agent")
# Tasks that have their prompts, or their scorer, from another task, `task.args.task`.

# A task's libraries are loaded only where the task is used: those of reasoning_gym and data sets take a second each.


_ARGUMENTS = {
    "copy": "strings:StringsArguments",
    "successor": "strings:StringsArguments",
    "lookup": "strings:StringsArguments",
    "reasoning_gym": "reasoning_gym:ReasoningGymArguments",
    "tools": "tools:ToolsArguments",
    "remote": "remote:RemoteArguments",
    "agent": "agent:AgentArguments",
}
# Where the arguments of each task are; those of all others, which ask questions of a data set, are one class.


def build_task(
    config: TaskConfig | TaskShare, seed: int, split: Literal["train", "probe"], own: Environment | None = None
) -> Environment:
    """The environment of `config`. No prompt of the probe split occurs in the train split of the same task.

    `own` stands for the class of the user's that `config`, or the task inside it, names by a path; None: it is loaded.

    Raises ValueError, with one line that begins with the key: `task.args.KEY` for arguments that do not fit,
    `task.name` for a class of the user's that cannot be loaded.
    """
    match config.name:
        case "copy" | "successor":
            from streamrl.tasks.strings import Strings, StringsArguments

            return Strings(config.name, parse_arguments(StringsArguments, config.args), seed, split)
        case "reasoning_gym":
            from streamrl.tasks.reasoning_gym import ReasoningGym, ReasoningGymArguments

            return ReasoningGym(parse_arguments(ReasoningGymArguments, config.args), seed, split)
        case "jsonl" | "gsm8k" | "math" | "dapo_math" | "aime_2024" | "openmath" | "big_math" | "countdown" | "geo3k":
            from streamrl.tasks.hub import DATA_SETS
            from streamrl.tasks.questions import Questions, QuestionsArguments

            whole = {"evaluation_only": True} if isinstance(config, TaskShare) and config.evaluation_only else {}
            arguments = DATA_SETS.get(config.name, {}) | config.args | whole
            return Questions(parse_arguments(QuestionsArguments, arguments), seed, split)
        case "lookup":
            from streamrl.tasks.lookup import Lookup
            from streamrl.tasks.strings import StringsArguments

            return Lookup(parse_arguments(StringsArguments, config.args), seed, split)
        case name if name in AROUND:
            return _around_another(config, seed, split, own)
        case path:
            return own if own is not None else _own_task(path, config.args, seed, split)


def own_share(config: TaskConfig | TaskShare) -> TaskShare | None:
    """The task in it that is a class of the user's, named by a path; None where there is none.

    >>> own_share(TaskShare(name="agent", args={"task": {"name": "mine.py:Mine"}})).name
    'mine.py:Mine'
    """
    if ":" in config.name:
        return TaskShare(name=config.name, args=config.args)
    inside = config.args.get("task") if config.name in AROUND else None
    if not isinstance(inside, dict) or "name" not in inside:
        return None
    try:
        return own_share(TaskShare.model_validate(inside))
    except ValidationError:  # which `build_task` refuses
        return None


def _own_task(path: str, args: dict[str, Any], seed: int, split: str) -> Environment:
    own = _own_class(path)
    task: Environment = own(parse_arguments(own.Arguments, args), seed, split)
    return task


def arguments_of(name: str) -> type[TaskArguments]:
    """What the `task.args` of a task are checked against. Raises ValueError for a class that cannot be loaded."""
    if ":" in name:
        own: type[TaskArguments] = _own_class(name).Arguments
        return own
    module, _, kind = _ARGUMENTS.get(name, "questions:QuestionsArguments").partition(":")
    arguments: type[TaskArguments] = getattr(importlib.import_module(f"streamrl.tasks.{module}"), kind)
    return arguments


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


def _own_class(path: str) -> Any:
    """The user's subclass of Environment that a path names: Any, because it is built by a convention of its own."""
    try:
        own = load_named(path, "class")
    except Exception as error:  # whatever a module of the user's raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"task.name: {path} cannot be loaded: {reason}") from error
    if not (isinstance(own, type) and issubclass(own, Environment)):
        raise ValueError(f"task.name: {path} is no subclass of {Environment.__module__}.{Environment.__name__}")
    return own


def _around_another(
    config: TaskConfig | TaskShare, seed: int, split: Literal["train", "probe"], own: Environment | None
) -> Environment:
    """A task that has its prompts, or its scorer, from another task."""
    match config.name:
        case "tools":
            from streamrl.tasks.tools import Tools, ToolsArguments

            tools = parse_arguments(ToolsArguments, config.args)
            return Tools(tools, build_task(tools.task, seed, split, own))
        case "remote":
            from streamrl.tasks.remote import Remote, RemoteArguments

            remote = parse_arguments(RemoteArguments, config.args)
            return Remote(remote, build_task(remote.task, seed, split, own) if remote.task else None, split)
        case _:
            from streamrl.tasks.agent import Agent, AgentArguments

            agent = parse_arguments(AgentArguments, config.args)
            return Agent(agent, build_task(agent.task, seed, split, own))
