"""Layers with a window among layers without: what families read of `config.json` for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.learner.shape import UnsupportedModelError, need

WINDOWED = "sliding_attention"
KINDS = ("full_attention", WINDOWED)


def windowed_layers(path: Path, config: dict[str, Any], default: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers, from 0, that have a window: by `layer_types`, or by `default` without it.

    Raises UnsupportedModelError for other kinds, and for a list of another length.
    """
    need(path, config, "num_hidden_layers")
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [KINDS[default(layer)] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds).issubset(KINDS):
        raise UnsupportedModelError(f"{path}: layer_types={kinds}; allowed: {layers} of {', '.join(KINDS)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)
