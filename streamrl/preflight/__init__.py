"""The checks before any process starts: what a configuration asks of its model, its prompts, the wire, the machine.

    keys (config/) ──▶ the model and its tokenizer can be read, the model can be cut so, tasks have their arguments
                   ──▶ tasks can be loaded ──▶ the longest prompt and answer fit row, context, message

What one of these stages refuses is told at once. `train`, `sweep`, `retrain` and a role that is started from a
configuration make them; `plan` makes the same ones for prompts and machines that it is given. Pure, but for reading the
model's folder and the prompts.
"""

from __future__ import annotations

import asyncio

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.refused import Refusals
from streamrl.evaluate.evaluator import host_evaluated
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.shape import ModelShape, read_shape, weight_files
from streamrl.preflight.lengths import check_evaluated, check_lengths
from streamrl.preflight.machine import check_machine
from streamrl.preflight.model import check_folder, check_model
from streamrl.preflight.prompts import longest_prompt, tokenizer_of
from streamrl.preflight.tokenizer import check_tokenizer
from streamrl.preflight.wire import check_wire, group_bytes
from streamrl.tasks.environment import Environment
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks, host_tasks
from streamrl.tasks.registry import check_arguments


def check_start(config: Config) -> None:
    """All checks of a run whose processes this machine starts. Raises ConfigError, as `check` does."""
    refusals = Refusals()
    with refusals:
        check_machine(config)
    with refusals:
        check(config)
    refusals.tell()


def check(config: Config) -> None:
    """Make all of them. Raises ConfigError, with one line for each mistake of the first stage that finds one."""
    shape, tokenizer = _readable(config)
    asyncio.run(_check(config, shape, tokenizer))


def _readable(config: Config) -> tuple[ModelShape, Tokenizer]:
    """What a folder and the arguments of built-in tasks say, in a moment. Raises ConfigError."""
    refusals, folder = Refusals(), Refusals()
    with folder:
        check_folder(config)
    refusals.add(*folder.lines)
    shape: ModelShape | None = None
    tokenizer: Tokenizer | None = None
    if not folder.lines:
        with refusals:
            shape = check_layout(config)
        with refusals:
            tokenizer = tokenizer_of(config.model.path)
        if shape is not None and tokenizer is not None:
            with refusals:
                check_tokenizer(config.model.path, tokenizer, shape)
    for share in (*config.task.trained, *(config.evaluate.tasks if config.evaluate.every else ())):
        with refusals:
            check_arguments(share)
    refusals.tell()
    assert shape is not None
    assert tokenizer is not None
    return shape, tokenizer


async def _check(config: Config, shape: ModelShape, tokenizer: Tokenizer) -> None:
    """What needs the prompts: tasks of the user's are loaded in processes of their own, for as long as this takes."""
    tasks: dict[str, Environment] = {}
    evaluated: dict[str, Environment] = {}
    try:
        tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task.scoring)
        evaluated = await host_evaluated(config) if config.evaluate.every else {}
        await _check_sizes(config, shape, tokenizer, tasks, evaluated)
    except ScorerUnready as error:
        raise ConfigError(f"task.name: {error}; allowed: a class that can be loaded in that time") from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    finally:
        await asyncio.gather(close_tasks(tasks), close_tasks(evaluated))


async def _check_sizes(
    config: Config,
    shape: ModelShape,
    tokenizer: Tokenizer,
    tasks: dict[str, Environment],
    evaluated: dict[str, Environment],
) -> None:
    """Raises ConfigError for what the model, a row of the learner or a message cannot hold."""
    refusals = Refusals()
    longest = await longest_prompt(tasks, tokenizer)
    with refusals:
        check_lengths(config, shape, longest)
    if evaluated:
        with refusals:
            check_evaluated(config, shape, await longest_prompt(evaluated, tokenizer))
    with refusals:
        check_wire(config, group_bytes(config, shape, longest.tokens))
    refusals.tell()


def check_layout(config: Config) -> ModelShape:
    """Those that ask the model alone, and no task. Returns its shape. Raises ConfigError."""
    check_folder(config)
    shape = read_shape(config.model.path, family=config.model.family)
    weight_files(config.model.path)
    check_model(config, shape)
    return shape
