"""The checks before any process starts: what a configuration asks of its model, its prompts, the wire, the machine.

    keys (config/) ──▶ the model and its tokenizer can be read, the model can be cut so, tasks have their arguments
                   ──▶ tasks can be loaded ──▶ long prompts are left out
                   ──▶ row, context, message hold the longest of the others and its answer

What one of these stages refuses is told at once. `train`, `sweep`, `retrain` and a role that is started from a
configuration make them; `plan` makes the same ones for prompts and machines that it is given. Pure, but for reading the
model's folder and the prompts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from streamrl.choices import LOSSES
from streamrl.config import Config, senseless
from streamrl.config.file import ConfigError
from streamrl.config.refused import Refusals
from streamrl.evaluate.evaluator import host_evaluated
from streamrl.generate.prompt_images import PromptImages
from streamrl.generate.tokenizer import Tokenizer
from streamrl.hub.model import with_local_models
from streamrl.learner.shape import ModelShape, read_shape, weight_files
from streamrl.preflight.drafts import check_drafts
from streamrl.preflight.lengths import check_evaluated, check_lengths, evaluated_limit, prompt_limit
from streamrl.preflight.machine import check_machine
from streamrl.preflight.model import check_folder, check_images, check_model
from streamrl.preflight.prompts import Seen, measure_prompts, tokenizer_of, unread_variables
from streamrl.preflight.teacher import check_critic, check_teacher, check_teacher_length
from streamrl.preflight.tokenizer import check_tokenizer
from streamrl.preflight.wire import check_wire, group_bytes
from streamrl.reward_model.folder import check_folder as check_reward_model
from streamrl.tasks import left_out
from streamrl.tasks.environment import Environment
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks, host_tasks
from streamrl.tasks.left_out import LeftOut
from streamrl.tasks.registry import check_arguments
from streamrl.tasks.weighted import check_turns


def check_start(config: Config, *, fresh: bool = False) -> LeftOut:
    """All checks of a run whose processes this machine starts. Returns and raises as `check` does."""
    refusals, found = Refusals(), LeftOut()
    with refusals:
        check_machine(config)
    with refusals:
        found = check(config, fresh=fresh)
    refusals.tell()
    return found


def check(config: Config, *, fresh: bool = False, weights: bool = True) -> LeftOut:
    """Make all of them. Returns the prompts that the run leaves out.

    `fresh`: what an existing run folder says of its prompts is not of this run. `weights`: are they there, too?
    Raises ConfigError, with one line for each mistake of the first stage that finds one.
    """
    if config.trains_rows:
        raise ConfigError(
            f"algo.loss: {config.algo.loss} trains the rows of `streamrl sft`, and no answers of generators; "
            f"allowed: {LOSSES.allowed}"
        )
    shape, tokenizer = _readable(config, weights=weights)
    recorded = LeftOut() if fresh else left_out.load(config.run_folder)
    return asyncio.run(_check(config, shape, tokenizer, recorded))


def _readable(config: Config, *, weights: bool) -> tuple[ModelShape, Tokenizer]:
    """What a folder and the arguments of built-in tasks say, in a moment. Raises ConfigError."""
    refusals = Refusals()
    with refusals:
        shape = check_layout(config, weights=weights)
        images = PromptImages.of(config.model.path, config.task.max_image_bytes)
        tokenizer = tokenizer_of(config.model.path, variables=config.task.chat_template_kwargs, images=images)
        check_tokenizer(config.model.path, tokenizer, shape)
        check_drafts(config, shape, weights=weights)
    with refusals:
        check_reward_model(config)
    _check_tasks(config, refusals)
    refusals.tell()
    senseless.warn(unread_variables(tokenizer))
    return shape, tokenizer


def local_model(config: Config) -> Config:
    """The configuration with its model in a folder; beside a model that cannot be had, mistakes of tasks are told.

    Raises ConfigError.
    """
    refusals = Refusals()
    with refusals:
        return with_local_models(config)
    _check_tasks(config, refusals)
    refusals.tell()
    return config


def _check_tasks(config: Config, refusals: Refusals) -> None:
    for share in (*config.task.trained, *(config.evaluate.tasks if config.evaluate.every else ())):
        with refusals:
            check_arguments(share)


async def _check(config: Config, shape: ModelShape, tokenizer: Tokenizer, recorded: LeftOut) -> LeftOut:
    """What needs the prompts: tasks of the user's are loaded in processes of their own, for as long as this takes."""
    tasks: dict[str, Environment] = {}
    evaluated: dict[str, Environment] = {}
    try:
        tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task)
        evaluated = await host_evaluated(config) if config.evaluate.every else {}
        check_turns(config, tasks)
        sizes = Sizes(config, shape, tokenizer)
        return await _check_sizes(sizes, tasks, evaluated, recorded)
    except ScorerUnready as error:
        raise ConfigError(f"task.name: {error}; allowed: a class that can be loaded in that time") from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    finally:
        await asyncio.gather(close_tasks(tasks), close_tasks(evaluated))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What prompts and answers have to fit."""

    config: Config
    shape: ModelShape
    tokenizer: Tokenizer


async def _check_sizes(
    sizes: Sizes,
    tasks: dict[str, Environment],
    evaluated: dict[str, Environment],
    recorded: LeftOut,
) -> LeftOut:
    """Raises ConfigError for what the model, a row of the learner or a message cannot hold."""
    config, shape, refusals = sizes.config, sizes.shape, Refusals()
    limit, cut = prompt_limit(config, shape), config.task.cut
    if cut is not None and limit < 1:
        raise ConfigError(
            f"task.long_prompts: {cut} has nothing to leave of a prompt: an answer of generate.sampling.max_new_tokens "
            "takes the whole context; allowed: a longer context, or shorter answers"
        )
    trained = await measure_prompts(tasks, sizes.tokenizer, limit, recorded.trained, cut)
    _check_key(config, trained)
    held_out: Seen | None = None
    with refusals:
        check_lengths(config, shape, trained.longest)
    with refusals:
        check_teacher_length(config, shape, trained.longest)
    if evaluated:
        held_out = await measure_prompts(evaluated, sizes.tokenizer, max(1, evaluated_limit(config, shape)), {}, cut)
        _check_key(config, held_out)
        with refusals:
            check_evaluated(config, shape, held_out.longest)
    with refusals:
        check_wire(config, group_bytes(config, shape, trained.longest.tokens, trained.image_bytes))
    refusals.tell()
    return LeftOut(trained=trained.of_tasks, evaluated=held_out.of_tasks if held_out else {})


def _check_key(config: Config, seen: Seen) -> None:
    """Refuse long prompts where they are to be, and a `task.max_prompt_tokens` that leaves a task no prompt.

    Raises ConfigError.
    """
    for name, found in seen.of_tasks.items():
        if config.task.long_prompts == "refuse" and found.too_long:
            raise ConfigError(
                f"task.long_prompts: refuse, and {found.too_long:,} of {found.looked:,} prompts of {name} have more "
                f"than {found.limit:,} tokens, the longest {found.longest:,}; allowed: leave_out, cut_left, cut_right, "
                "cut_middle, or another task.max_prompt_tokens"
            )
        if config.task.cut is not None:
            continue
        if config.task.max_prompt_tokens is not None and found.too_long == found.looked:
            raise ConfigError(
                f"task.max_prompt_tokens: {found.limit} leaves out all {found.looked:,} prompts of {name} that were "
                f"looked at, the shortest of {found.shortest:,} tokens; allowed: at least that, or null"
            )


def check_layout(config: Config, *, weights: bool = True) -> ModelShape:
    """Those that ask the model alone, and no task. Returns its shape. `weights`: are they there? Raises ConfigError."""
    check_folder(config)
    shape = read_shape(config.model.path, family=config.model.built_by)
    if weights:
        weight_files(config.model.path)
    check_model(config, shape)
    check_images(config, shape)
    check_teacher(config, shape, weights=weights)
    check_critic(config, shape, weights=weights)
    return shape
