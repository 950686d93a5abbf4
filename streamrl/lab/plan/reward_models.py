"""What the reward models of a run take: their weights, by the headers of their folder. Their hosts are not placed."""

from __future__ import annotations

import json
import math
from pathlib import Path

from streamrl.config import Config
from streamrl.lab.plan.learner_memory import ITEM
from streamrl.lab.plan.machines import GIB, Machines


def weight_bytes(config: Config) -> int | None:
    """Bytes of one process's weights; None where the folder is not here, or there are no reward models."""
    settings = config.reward_model
    files = sorted(settings.path.glob("*.safetensors")) if settings.path is not None else []
    return sum(map(_numbers, files)) * ITEM[settings.dtype] if files else None


def host_bytes(config: Config, machines: Machines) -> int:
    """Bytes of all reward models in the first host's memory, where they run on cores; else 0."""
    on_cores = not machines.has_gpus or config.reward_model.gpus == 0
    return config.reward_model.processes * (weight_bytes(config) or 0) if on_cores else 0


def line(config: Config, machines: Machines) -> list[str]:
    """What the plan says of them, in one line; empty without them."""
    settings = config.reward_model
    if settings.path is None:
        return []
    weights = weight_bytes(config)
    size = "of unknown size (the folder is not here)" if weights is None else f"of {weights / GIB:.2f} GiB of weights"
    where = "on the first host's cores"
    if machines.has_gpus and settings.gpus:
        where = f"on {settings.processes * settings.gpus} further GPUs of one host, which the placement does not have"
    return [f"reward models: {settings.processes}, each {size}, {where}; their speed is not known"]


def _numbers(file: Path) -> int:
    """Numbers in a safetensors file."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    return sum(math.prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
