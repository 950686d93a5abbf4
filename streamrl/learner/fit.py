"""Whether a model can be cut as a layout says. Pure: who only plans a launch asks it without Megatron."""

from __future__ import annotations

from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.learner.shape import ModelShape


def check_fit(shape: ModelShape, layout: LayoutConfig) -> None:
    """Refuse a layout that this model cannot be cut into.

    Raises ConfigError: which key, what is given, what is allowed.

    Example: a model of 14 heads is not cut with `learner.layout.tensor: 4`.
    """
    whole = {"attention heads": shape.heads, "key and value heads": shape.groups, "MLP columns": shape.ffn}
    for what, count in whole.items():
        _must_divide("tensor", layout.tensor, count, what)
    stage_layers(shape.layers, layout)
    if shape.moe is None:
        if layout.expert > 1 or layout.expert_tensor > 1:
            raise ConfigError(
                f"learner.layout.expert: {max(layout.expert, layout.expert_tensor)} ranks cannot share experts, "
                f"{shape.architecture} has none; allowed: expert=1, expert_tensor=1"
            )
        return
    _must_divide("expert", layout.expert, shape.moe.experts, "experts")
    _must_divide("expert_tensor", layout.expert_tensor, shape.moe.ffn, "columns of an expert")
    if layout.tensor > 1 and not layout.sequence:
        raise ConfigError("learner.layout.sequence: false with experts and tensor above 1; allowed: true")


def stage_layers(layers: int, layout: LayoutConfig) -> tuple[int, ...]:
    """How many of a model's layers each pipeline stage has.

    Raises ConfigError where the stages between the first and the last do not share theirs evenly.

    >>> stage_layers(94, LayoutConfig(pipeline=8, first_stage=11, last_stage=11))
    (11, 12, 12, 12, 12, 12, 12, 11)
    """
    given = {0: layout.first_stage, layout.pipeline - 1: layout.last_stage}
    own = {stage: count for stage, count in given.items() if count is not None}
    left, stages = layers - sum(own.values()), layout.pipeline - len(own)
    share = left // stages if stages else 0
    if share * stages != left or (stages and (not share or share % layout.virtual)):
        ends = "".join(
            f", {name} {count}" for name, count in zip(("first", "last"), given.values(), strict=False) if count
        )
        raise ConfigError(
            f"learner.layout.pipeline: {layout.pipeline} stages of {layout.virtual} chunks{ends} do not share {layers} "
            "layers evenly; allowed: pipeline x virtual that divides them, or first_stage and last_stage beside it"
        )
    return tuple(own.get(stage, share) for stage in range(layout.pipeline))


def _must_divide(key: str, size: int, count: int, what: str) -> None:
    if count % size:
        raise ConfigError(f"learner.layout.{key}: {size} does not divide {count} {what}; allowed: a divisor of {count}")
