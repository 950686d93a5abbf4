"""The family `phi3`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily
from streamrl.learner.rope import LONGROPE, RopeScaling
from streamrl.learner.shape import ModelShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from streamrl.config.learner import LoraTarget
    from streamrl.learner.mapping import Cut

_NAMES = (LONGROPE, "su")  # of the same scaling
_ORIGINAL = "original_max_position_embeddings"


class Phi3(ModelFamily):
    """Phi-3 and Phi-4-mini: heads turned in part, with LongRoPE (arXiv 2402.13753) up to the context of the first
    training, beyond which transformers takes other factors for a whole sequence. Its dropouts are not applied.

    Its folders have queries, keys and values in one tensor, and gate and up projection in another, of which an adapter
    would have one A.
    """

    architectures = ("Phi3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    rotary_part = 1.0
    served_adapters = False
    served_blocks = False
    without_adapters: ClassVar[frozenset[LoraTarget]] = frozenset(("linear_qkv", "linear_fc1"))
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_LAYER,
        "self_attention.linear_qkv.weight": ("fused_qkv", ("self_attn.qkv_proj.weight",)),
        "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_up_proj.weight",)),
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = given.get("rope_type") or given.get("type")
        if kind not in _NAMES:
            return super().read(path, config)
        plain = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
        without = {key: value for key, value in config.items() if key != "rope_scaling"}
        shape = super().read(path, without | {"rope_parameters": plain})
        scaling = _scaling(path, given, config, shape)
        return replace(shape, rope=replace(shape.rope, scaling=scaling), max_length=scaling.original_length)

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        super().refuse(path, config)
        cls._refuse_window(path, config, None)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        import torch

        from streamrl.learner.mapping import QKV, Cut

        def split(shape: ModelShape, part: Any) -> list[Any]:
            return [torch.cat(list(QKV.split(shape, part)))]

        def join(shape: ModelShape, pieces: Any) -> Any:
            (piece,) = pieces
            unit = piece.size(0) // (shape.heads + 2 * shape.groups)
            return QKV.join(shape, piece.split([unit * heads for heads in _heads(shape)]))

        return {"fused_qkv": Cut(0, join, split, blocks_of=_heads)}


def _heads(shape: ModelShape) -> tuple[int, int, int]:
    """Heads of queries, keys and values."""
    return shape.heads, shape.groups, shape.groups


def _scaling(path: Path, given: dict[str, Any], config: dict[str, Any], shape: ModelShape) -> RopeScaling:
    """LongRoPE with the factors of short sequences."""
    original: Any = given.get(_ORIGINAL) or config.get(_ORIGINAL)
    need(path, {_ORIGINAL: original}, _ORIGINAL)
    grown = shape.max_length / original
    only = {"factor": grown, "attention_factor": None, "short_mscale": None, "long_mscale": None}
    for key, allowed in only.items():  # SGLang and transformers read different ones of them
        if given.get(key) not in (None, allowed):
            problem = f"{key}={given[key]!r} is not supported for longrope"
            raise UnsupportedModelError(f"{path}: {problem}; allowed: {allowed}")
    short, pairs = given.get("short_factor") or (), len(range(0, int(shape.head_dim * shape.rope.part), 2))
    if len(short) != pairs:
        raise UnsupportedModelError(f"{path}: short_factor has {len(short)} numbers; allowed: {pairs}")
    return RopeScaling(
        kind=LONGROPE,
        factor=grown,
        original_length=original,
        attention=math.sqrt(1 + math.log(grown) / math.log(original)) if grown > 1 else 1.0,
        short=tuple(float(factor) for factor in short),
    )
