"""Task names and the environments behind them."""

from __future__ import annotations

from typing import Literal

from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.arguments import parse_arguments
from streamrl.tasks.environment import Environment

# A task's libraries are loaded only where the task is used: those of reasoning_gym and jsonl take a second each.


def build_tasks(config: TaskConfig, seed: int) -> dict[str, Environment]:
    """The environments of all weighted tasks of a run, train split, by the names that tickets have for them.

    Raises ValueError as `build_task` does.
    """
    return {share.key: build_task(share, seed, split="train") for share in config.shares if share.weight > 0}


def build_task(config: TaskConfig | TaskShare, seed: int, split: Literal["train", "probe"]) -> Environment:
    """The environment of `config`. No prompt of the probe split occurs in the train split of the same task.

    Raises ValueError, with one line that begins with `task.args.KEY`, for arguments that do not fit.
    """
    match config.name:
        case "copy" | "successor":
            from streamrl.tasks.strings import Strings, StringsArguments

            return Strings(config.name, parse_arguments(StringsArguments, config.args), seed, split)
        case "reasoning_gym":
            from streamrl.tasks.reasoning_gym import ReasoningGym, ReasoningGymArguments

            return ReasoningGym(parse_arguments(ReasoningGymArguments, config.args), seed, split)
        case "jsonl":
            from streamrl.tasks.jsonl import Jsonl, JsonlArguments

            return Jsonl(parse_arguments(JsonlArguments, config.args), seed, split)
