"""The checks before any process starts: what a configuration asks of its model, its prompts, the wire, the machine.

    keys (config/) ──▶ task and model can be read ──▶ the model can be cut so ──▶ the longest prompt and answer fit
                                                                                  row, context, message

`train`, `sweep`, `retrain` and a role that is started from a configuration make them; `plan` makes the same ones for
prompts and machines that it is told of. Pure, but for reading the model's folder and the prompts.
"""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.evaluate.evaluator import build_evaluated
from streamrl.learner.shape import ModelShape, read_shape
from streamrl.preflight.lengths import check_evaluated, check_lengths
from streamrl.preflight.model import check_folder, check_model, check_weights
from streamrl.preflight.prompts import longest_prompt, tokenizer_of
from streamrl.preflight.wire import check_wire, group_bytes
from streamrl.replay.curriculum import make_curriculum
from streamrl.tasks.registry import build_tasks


def check(config: Config) -> None:
    """Make all of them. Raises ConfigError, with one line, for the first that fails."""
    check_folder(config)
    try:
        tasks = build_tasks(config.task, config.run.seed)
        evaluated = build_evaluated(config) if config.evaluate.every else {}
        make_curriculum(config.replay.curriculum, config.run.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    shape = check_layout(config)
    tokenizer = tokenizer_of(config.model.path)
    longest = longest_prompt(tasks, tokenizer)
    check_lengths(config, shape, longest)
    if evaluated:
        check_evaluated(config, shape, longest_prompt(evaluated, tokenizer))
    check_wire(config, group_bytes(config, shape, longest.tokens))


def check_layout(config: Config) -> ModelShape:
    """Those that ask the model alone, and no task. Returns its shape. Raises ConfigError."""
    check_folder(config)
    shape = read_shape(config.model.path)
    check_weights(config.model.path)
    check_model(config, shape)
    return shape
