"""The checks before any process starts: what a configuration asks of its model, its prompts, the wire, the machine.

    keys (config/) ──▶ task and model can be read ──▶ the model can be cut so ──▶ the longest prompt and answer fit
                                                                                  row, context, message

`train`, `sweep`, `retrain` and a role that is started from a configuration make them; `plan` makes the same ones for
prompts and machines that it is given. Pure, but for reading the model's folder and the prompts.
"""

from __future__ import annotations

import asyncio

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.evaluate.evaluator import host_evaluated
from streamrl.learner.shape import ModelShape, read_shape, weight_files
from streamrl.preflight.lengths import check_evaluated, check_lengths
from streamrl.preflight.model import check_folder, check_model
from streamrl.preflight.prompts import longest_prompt, tokenizer_of
from streamrl.preflight.wire import check_wire, group_bytes
from streamrl.tasks.environment import Environment
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks, host_tasks


def check(config: Config) -> None:
    """Make all of them. Raises ConfigError, with one line, for the first that fails."""
    check_folder(config)
    asyncio.run(_check(config))


async def _check(config: Config) -> None:
    """What follows the folder: tasks of the user's are loaded in processes of their own, for as long as this takes."""
    tasks: dict[str, Environment] = {}
    evaluated: dict[str, Environment] = {}
    try:
        tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task.scoring)
        evaluated = await host_evaluated(config) if config.evaluate.every else {}
        await _check_sizes(config, tasks, evaluated)
    except ScorerUnready as error:
        raise ConfigError(f"task.name: {error}; allowed: a class that can be loaded in that time") from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    finally:
        await asyncio.gather(close_tasks(tasks), close_tasks(evaluated))


async def _check_sizes(config: Config, tasks: dict[str, Environment], evaluated: dict[str, Environment]) -> None:
    """Raises ConfigError for what the model, a row of the learner or a message cannot hold."""
    shape = check_layout(config)
    tokenizer = tokenizer_of(config.model.path)
    longest = await longest_prompt(tasks, tokenizer)
    check_lengths(config, shape, longest)
    if evaluated:
        check_evaluated(config, shape, await longest_prompt(evaluated, tokenizer))
    check_wire(config, group_bytes(config, shape, longest.tokens))


def check_layout(config: Config) -> ModelShape:
    """Those that ask the model alone, and no task. Returns its shape. Raises ConfigError."""
    check_folder(config)
    shape = read_shape(config.model.path, family=config.model.family)
    weight_files(config.model.path)
    check_model(config, shape)
    return shape
