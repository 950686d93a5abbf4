"""How a layout cuts a model, and which layouts a model cannot be cut into.

Pure: a plan, a conversion and the checks before a start ask it without Megatron.
"""

from __future__ import annotations

from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.learner.shape import ModelShape


def check_fit(shape: ModelShape, layout: LayoutConfig) -> None:
    """Refuse a layout that this model cannot be cut into.

    Raises ConfigError: which key, what is given, what is allowed.

    Example: a model of 14 heads is not cut with `learner.layout.tensor: 4`.
    """
    shape.family.check_layout(shape, layout)
    if not shape.family.by_megatron:
        return
    whole = {"attention heads": shape.heads, "key and value heads": shape.groups, "MLP columns": shape.ffn}
    for what, count in whole.items():
        _must_divide("tensor", layout.tensor, count, what)
    first = stage_layers(shape.layers, layout)[0] // layout.virtual
    if shape.vision is not None and first < shape.vision.levels:
        raise ConfigError(
            f"learner.layout.pipeline: {layout.pipeline} stages leave {first} layers to the first chunk, and features "
            f"of images enter the first {shape.vision.levels}; allowed: fewer stages, or first_stage"
        )
    if layout.fully_sharded and shape.vision is not None:
        raise ConfigError(
            f"learner.layout.sharding: full was never tried with a vision tower, and {shape.architecture} has one; "
            "allowed: optimizer"
        )
    if layout.fully_sharded and shape.moe is not None and layout.tensor > 1:
        raise ConfigError(
            f"learner.layout.sharding: full with experts and learner.layout.tensor={layout.tensor}, over whose ranks "
            "gradients of experts are summed as well; allowed: optimizer, or tensor=1"
        )
    if shape.delta is not None:
        _must_divide("tensor", layout.tensor, shape.delta.keys, "key heads of delta-net layers")
        _no_context(shape, layout, "delta-net")
        if layout.tensor > 1 and not layout.sequence:
            raise ConfigError("learner.layout.sequence: false with delta-net layers and tensor above 1; allowed: true")
    if shape.mamba is not None:
        _must_divide("tensor", layout.tensor, shape.mamba.groups, "groups of heads of Mamba-2 layers")
        _no_context(shape, layout, "Mamba-2")
    _check_experts(shape, layout)


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


def _check_experts(shape: ModelShape, layout: LayoutConfig) -> None:
    if shape.attention.bias and layout.expert_tensor > 1:
        raise ConfigError(
            f"learner.layout.expert_tensor: {layout.expert_tensor} ranks would each add the biases of "
            f"{shape.architecture}'s experts; allowed: 1, with learner.layout.expert above 1"
        )
    if shape.moe is None:
        if layout.expert > 1 or layout.expert_tensor > 1:
            raise ConfigError(
                f"learner.layout.expert: {max(layout.expert, layout.expert_tensor)} ranks cannot share experts, "
                f"{shape.architecture} has none; allowed: expert=1, expert_tensor=1"
            )
        return
    _must_divide("expert", layout.expert, shape.moe.experts, "experts")
    _must_divide("expert_tensor", layout.expert_tensor, shape.moe.ffn, "columns of an expert")
    _must_divide("tensor", layout.tensor, shape.moe.shared_ffn, "columns of the shared experts")
    if layout.tensor > 1 and not layout.sequence:
        raise ConfigError("learner.layout.sequence: false with experts and tensor above 1; allowed: true")


def _no_context(shape: ModelShape, layout: LayoutConfig, layers: str) -> None:
    if layout.context > 1:
        raise ConfigError(
            f"learner.layout.context: {layout.context} ranks would each need the state that the one before leaves "
            f"in {shape.architecture}'s {layers} layers; allowed: 1"
        )


def _must_divide(key: str, size: int, count: int, what: str) -> None:
    if count % size:
        raise ConfigError(f"learner.layout.{key}: {size} does not divide {count} {what}; allowed: a divisor of {count}")
