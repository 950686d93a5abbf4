"""What a teacher's folder says of its model, and whether it can score this policy's tokens on this layout.

Pure, as `shape.py`: a plan and the checks before a start ask it without Megatron.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.learner.layout_fit import check_fit
from streamrl.learner.shape import ModelShape, read_shape

KEY = "algo.distillation.teacher"


def teacher_shape(config: Config, policy: ModelShape) -> ModelShape | None:
    """The shape of the teacher; None without one.

    It may be of any family and size that the layout of the learner divides. An embedding with more rows than the
    policy's is padded further, as those of one family's sizes are; one with fewer would lack tokens that the policy
    may draw. Raises ConfigError, a line for each mistake.
    """
    settings = config.algo.distillation
    if settings.teacher is None:
        return None
    return shape_beside(policy, settings.teacher, KEY, config.model.builder(settings.family), config.learner.layout)


def shape_beside(policy: ModelShape, folder: Path, key: str, family: str | None, layout: LayoutConfig) -> ModelShape:
    """The shape of a model that reads the policy's tokens on the policy's ranks. Raises as `teacher_shape`.

    key: of the configuration, which names the folder.
    """
    shape = read_shape(folder, key, family)
    if shape.vocabulary < policy.vocabulary:
        raise ConfigError(
            f"{key}: {folder} has {shape.vocabulary} tokens, and the policy draws from {policy.vocabulary}; "
            "allowed: a model with the policy's vocabulary"
        )
    if policy.vision is not None and (shape.vision is None or shape.vision.input != policy.vision.input):
        raise ConfigError(
            f"{key}: {folder} does not read images as the policy does; allowed: a model of its image tokens and patches"
        )
    try:
        check_fit(shape, layout)
    except ConfigError as error:
        raise ConfigError(f"{error} ({key}={folder})") from None
    return shape
