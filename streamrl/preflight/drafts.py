"""Whether what `generate.speculation` drafts with is there and has the policy's tokens: before any process starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.engine.hardware import has_cuda
from streamrl.engine.mamba_kernels import has_mamba
from streamrl.engine.sink_attention import has_sinks
from streamrl.learner.shape import ModelShape, open_weights, weight_files

_KEY = "generate.speculation"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_drafts(config: Config, shape: ModelShape, *, weights: bool = True) -> None:
    """Refuse a draft that is no model, or has other tokens; `weights`: are the policy's there? Raises ConfigError."""
    drafts = config.generate.speculation
    if drafts.algorithm is None or all(pool.attach for pool in config.generate.each_pool):
        return
    if drafts.draft_model is not None:
        _check_folder(drafts.draft_model, shape)
    elif drafts.has_model and weights and not _has_layers_to_draft(config.model.path, shape):
        raise ConfigError(
            f"{_KEY}.algorithm: {drafts.algorithm} drafts by layers of multi-token prediction, and {config.model.path} "
            "has none; allowed: a folder that has them, or another algorithm"
        )


def check_machine(config: Config) -> None:
    """Refuse drafts that servers of this machine cannot make. Raises ConfigError."""
    drafts = config.generate.speculation
    if drafts.algorithm is None or all(pool.attach for pool in config.generate.each_pool):
        return
    if drafts.has_model:
        if not has_cuda():
            raise ConfigError(
                f"{_KEY}.algorithm: {drafts.algorithm} needs a GPU, and this machine has none: SGLang 0.5.23 has no "
                "kernels for it there, and keeps the most probable token at every temperature; allowed: ngram, null"
            )
        return
    if not has_cuda() and (unknown := _unverified(config.model.path)):
        raise ConfigError(
            f"{_KEY}.algorithm: {drafts.algorithm} on a machine without a GPU: drafts are not verified with {unknown} "
            "there; allowed: null"
        )
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if lacking := [name for name in (compiler, "ninja") if shutil.which(name) is None]:
        raise ConfigError(
            f"{_KEY}.algorithm: {drafts.algorithm} is compiled by SGLang when it is first used, and this machine has "
            f"no {' and no '.join(lacking)}; allowed: an installation of them, or null"
        )


def _unverified(model: Path) -> str:
    """What a model has that `engine/cpu_ngram.py` does not know; empty where there is nothing."""
    if has_sinks(model):
        return "attention sinks"
    return "states of Mamba-2 layers" if has_mamba(model) else ""


def _check_folder(folder: Path, shape: ModelShape) -> None:
    try:
        vocabulary = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{_KEY}.draft_model: {folder} is no model (config.json with a vocab_size is missing); allowed: a Hugging "
            "Face folder"
        ) from None
    if vocabulary != shape.vocabulary:
        raise ConfigError(
            f"{_KEY}.draft_model: {folder} has {vocabulary} tokens, and the policy {shape.vocabulary}; allowed: a "
            "draft for the policy's vocabulary"
        )


def _has_layers_to_draft(folder: Path, shape: ModelShape) -> bool:
    for path in weight_files(folder):
        with open_weights(path) as file:
            if any(_drafts(name, shape) for name in file.keys()):  # noqa: SIM118, it is no dict
                return True
    return False


def _drafts(name: str, shape: ModelShape) -> bool:
    """Is this a tensor of a layer of multi-token prediction?"""
    if shape.family.unbuilt and name.startswith(shape.family.unbuilt):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= shape.layers
