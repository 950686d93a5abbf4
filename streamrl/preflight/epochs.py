"""`run.epochs` as `run.steps`: how many learner steps the prompts of the task make, once it is known which fit."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.tasks.left_out import LeftOut

# So that 0.1 of 30 prompts is 3 of them, however a product is rounded.
ROUNDING = 1e-9


def with_steps(config: Config, found: LeftOut) -> Config:
    """The configuration with `run.steps` in place of `run.epochs`; `found`: what was seen of the run's prompts.

    A group is one prompt, and the last step is a whole one: floor(epochs x prompts / groups_per_step). Raises
    ConfigError where a task has no end, several are mixed, or the prompts make no step.
    """
    epochs, groups = config.run.epochs, config.replay.groups_per_step
    if epochs is None:
        return config
    if len(found.trained) != 1:
        raise ConfigError(f"run.epochs: {epochs:g} of a mix of {len(found.trained)} tasks; allowed: run.steps")
    (name, task), *_ = found.trained.items()
    if task.fitting is None:
        raise ConfigError(f"run.epochs: {epochs:g} of {name}, whose prompts have no end; allowed: run.steps")
    steps = int(epochs * task.fitting / groups + ROUNDING)
    if steps < 1:
        raise ConfigError(
            f"run.epochs: {epochs:g} of the {task.fitting:,} prompts of {name} make no step of "
            f"replay.groups_per_step={groups}; allowed: at least {groups / task.fitting:.4g}"
        )
    run = config.run.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"run": run})
