"""The checks before any process starts: what a configuration asks of its model, its prompts, the wire, the machine.

    keys (config/) ──▶ task and model can be read ──▶ the model can be cut so ──▶ long prompts are left out
                                  row, context, message hold the longest of the others and its answer ◀──┘

`train`, `sweep`, `retrain` and a role that is started from a configuration make them; `plan` makes the same ones for
prompts and machines that it is given. Pure, but for reading the model's folder and the prompts.
"""

from __future__ import annotations

import asyncio

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.evaluate.evaluator import host_evaluated
from streamrl.learner.shape import ModelShape, read_shape, weight_files
from streamrl.preflight.lengths import check_evaluated, check_lengths, evaluated_limit, prompt_limit
from streamrl.preflight.model import check_folder, check_model
from streamrl.preflight.prompts import Seen, look_at, tokenizer_of
from streamrl.preflight.wire import check_wire, group_bytes
from streamrl.tasks import left_out
from streamrl.tasks.environment import Environment
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks, host_tasks
from streamrl.tasks.left_out import LeftOut


def check(config: Config, *, fresh: bool = False, weights: bool = True) -> LeftOut:
    """Make all of them. Returns the prompts that the run leaves out. Raises ConfigError for the first that fails.

    `fresh`: what an existing run folder says of its prompts is not of this run. `weights`: are they there, too?
    """
    check_folder(config)
    recorded = LeftOut() if fresh else left_out.load(config.run_folder)
    return asyncio.run(_check(config, recorded, weights=weights))


async def _check(config: Config, recorded: LeftOut, *, weights: bool) -> LeftOut:
    """What follows the folder: tasks of the user's are loaded in processes of their own, for as long as this takes."""
    tasks: dict[str, Environment] = {}
    evaluated: dict[str, Environment] = {}
    try:
        tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task.scoring)
        evaluated = await host_evaluated(config) if config.evaluate.every else {}
        shape = check_layout(config, weights=weights)
        return await _check_sizes(config, shape, tasks, evaluated, recorded)
    except ScorerUnready as error:
        raise ConfigError(f"task.name: {error}; allowed: a class that can be loaded in that time") from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    finally:
        await asyncio.gather(close_tasks(tasks), close_tasks(evaluated))


async def _check_sizes(
    config: Config,
    shape: ModelShape,
    tasks: dict[str, Environment],
    evaluated: dict[str, Environment],
    recorded: LeftOut,
) -> LeftOut:
    """Raises ConfigError for what the model, a row of the learner or a message cannot hold."""
    tokenizer = tokenizer_of(config.model.path)
    trained = await look_at(tasks, tokenizer, prompt_limit(config, shape), recorded.trained)
    check_lengths(config, shape, trained.longest)
    check_wire(config, group_bytes(config, shape, trained.longest.tokens))
    if not evaluated:
        return _told(config, trained, None)
    held_out = await look_at(evaluated, tokenizer, evaluated_limit(config, shape), {})
    check_evaluated(config, shape, held_out.longest)
    return _told(config, trained, held_out)


def _told(config: Config, trained: Seen, evaluated: Seen | None) -> LeftOut:
    """Raises ConfigError where a task has no prompt that fits."""
    found = LeftOut(trained=trained.of_tasks, evaluated=evaluated.of_tasks if evaluated else {})
    for name, of_task in (*found.trained.items(), *found.evaluated.items()):
        if of_task.too_long == of_task.looked:
            raise ConfigError(
                f"task.max_prompt_tokens: {of_task.limit} leaves out all {of_task.looked:,} prompts of {name} that "
                f"were looked at, the longest of {of_task.longest:,} tokens; allowed: more, or null"
            )
    return found


def check_layout(config: Config, *, weights: bool = True) -> ModelShape:
    """Those that ask the model alone, and no task. Returns its shape. `weights`: are they there? Raises ConfigError."""
    check_folder(config)
    shape = read_shape(config.model.path, family=config.model.family)
    if weights:
        weight_files(config.model.path)
    check_model(config, shape)
    return shape
