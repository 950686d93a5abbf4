"""What the vision-language models of Qwen share: how `config.json` is read, and where features are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from streamrl.learner.families.base import ModelFamily
from streamrl.learner.shape import ModelShape, UnsupportedModelError, need
from streamrl.learner.vision.shape import VisionShape

_ROPE = ("rope_parameters", "rope_scaling")
_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "spatial_merge_size")


class QwenVL(ModelFamily):
    """A language model of Qwen with a vision tower in front of it, and multimodal rotary positions."""

    engine = False
    served_adapters = False
    served_blocks = False
    adapters_prefix = "model.language_model.layers."
    vision_defaults: ClassVar[Mapping[str, Any]] = {}  # where `vision_config` has none

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        vision, text = config.get("vision_config"), config.get("text_config")
        if not isinstance(vision, dict):
            raise UnsupportedModelError(f"{path}: vision_config is missing; allowed: a vision-language model")
        text = cls._text(path, config, text if isinstance(text, dict) else {})
        shape = super().read(path, text)
        return replace(shape, vision=cls._read_vision(path, config, vision, text, shape))

    @classmethod
    def _text(cls, path: Path, config: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
        """The language model's part: beside the vision tower's, or in `text_config`."""
        outer = {key: value for key, value in config.items() if key not in ("vision_config", "text_config")}
        text = {**outer, **{key: value for key, value in nested.items() if key != "architectures"}}
        for key in ("tie_word_embeddings", "quantization_config"):
            if key in config:
                text[key] = config[key]
        rope: dict[str, Any] = next((text[key] for key in _ROPE if text.get(key)), {})
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "mrope":
            rope = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "default"}
        return {key: value for key, value in text.items() if key not in _ROPE} | {"rope_parameters": rope}

    @classmethod
    def _read_vision(
        cls, path: Path, config: dict[str, Any], given: dict[str, Any], text: dict[str, Any], shape: ModelShape
    ) -> VisionShape:
        filled = {**cls.vision_defaults, **given}
        need(path, filled, *_SIZES)
        image = config.get("image_token_id")
        if not isinstance(image, int) or not 0 <= image < shape.vocabulary:
            raise UnsupportedModelError(f"{path}: image_token_id={image!r} is not allowed; allowed: a token's id")
        sections = tuple(text["rope_parameters"].get("mrope_section") or ())
        turned = int(shape.head_dim * shape.rope.part)
        if len(sections) != 3 or 2 * sum(sections) != turned:
            raise UnsupportedModelError(
                f"{path}: mrope_section={list(sections)} is not allowed; allowed: three parts of {turned // 2}"
            )
        out = filled.get("out_hidden_size", shape.hidden)
        if out != shape.hidden:
            raise UnsupportedModelError(f"{path}: out_hidden_size={out} is not allowed; allowed: {shape.hidden}")
        vision = VisionShape(
            image=image,
            merge=filled["spatial_merge_size"],
            patch=filled["patch_size"],
            temporal=filled.get("temporal_patch_size", 2),
            channels=filled.get("in_channels", filled.get("in_chans", 3)),
            hidden=filled["hidden_size"],
            ffn=filled["intermediate_size"],
            depth=filled["depth"],
            out=out,
            levels=len(filled.get("deepstack_visual_indexes", ())),
            sections=sections,
            interleaved=bool(text["rope_parameters"].get("mrope_interleaved", False)),
            config=filled,
            tensors={},
        )
        if vision.levels > shape.layers:
            raise UnsupportedModelError(
                f"{path}: deepstack_visual_indexes has {vision.levels} levels; allowed: one a layer, {shape.layers}"
            )
        return replace(vision, tensors=cls.tower_tensors(vision))
