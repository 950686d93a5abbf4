"""What one checkpoint takes on each host: bytes that its ranks write, and host memory until they are written.

A rank copies what it writes to the host's memory, and a thread writes the copy (`learner/checkpoint_saver.py`). With n,
e and D as in `learner_memory.py` a rank writes, and holds:

    weights      e n / D: the ranks that have the same ones share them out; frozen ones, too
    optimizer    12 n / D: float32 weights and two moments; each rank has its own with the distributed optimizer
                 (`learner/checkpoint_optimizer.py`), else they share it out; 8 n / D for a float32 model without

A critic is written as a policy without adapters is. n counts adapters alone for the optimizer of LoRA. A tensor of
weights is written whole: two ranks differ by one at the most. What tensor-parallel ranks have alike (norms, routers) is
counted for each of them, and written once.
With `checkpoint.export_each` rank 0 writes the whole model besides, and holds one file of it; with `checkpoint.export`
it does so once, at the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from streamrl.config import Config
from streamrl.config.learner import LearnerConfig
from streamrl.lab.plan.learner_memory import ITEM, MASTER, MOMENTS, is_distributed
from streamrl.lab.plan.machines import GB, Machines
from streamrl.lab.plan.parameters import Parameters, of_critic, of_stage, whole_adapters, whole_model
from streamrl.lab.plan.placement import Host
from streamrl.learner.critic_shape import critic_shape
from streamrl.learner.shape import SHARD_BYTES, ModelShape


@dataclass(frozen=True, slots=True)
class Save:
    """Bytes of one checkpoint on one host."""

    written: int
    held: int  # in the host's memory, until the ranks' files are written

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def saves(config: Config, shape: ModelShape, machines: Machines, hosts: Sequence[Host]) -> list[Save]:
    """What each of these hosts writes and holds."""
    layout = config.learner.layout
    stages = [_rank_bytes(config, shape, machines, stage) for stage in range(layout.pipeline)]
    of_a_stage = config.learner.ranks // layout.pipeline  # neighbours in rank
    found = []
    for host in hosts:
        ranks = range(host.first_rank, host.first_rank + host.learner_ranks)
        copies = sum(stages[rank // of_a_stage] for rank in ranks)
        exported = exported_bytes(config, shape) if 0 in ranks and config.checkpoint.export_each else 0
        found.append(Save(written=copies + exported, held=copies + min(exported, SHARD_BYTES)))
    return found


def on_disk(found: Sequence[Save], model: int, config: Config) -> int:
    """Bytes of the checkpoints and of the trained model at the end of a run, without those of `checkpoint.keep_every`.

    One checkpoint more is there while it is written: the oldest one goes behind it.
    """
    return (config.checkpoint.keep + 1) * sum(each.written for each in found) + model


def seconds(found: Sequence[Save], machines: Machines) -> float:
    """Until all of it is on the shared file system."""
    return sum(each.written for each in found) / (machines.disk * GB)


def alike(found: Sequence[Save]) -> list[tuple[int, int, Save]]:
    """(first host, last host, each of them) of neighbours that do the same, without hosts that write nothing."""
    cuts = [0, *(index for index, (one, next_) in enumerate(pairwise(found), 1) if one != next_), len(found)]
    return [(first, end - 1, found[first]) for first, end in pairwise(cuts) if found[first].written]


def _rank_bytes(config: Config, shape: ModelShape, machines: Machines, stage: int) -> int:
    """What a rank of this stage writes into its file."""
    learner, layout = config.learner, config.learner.layout
    counted = of_stage(shape, layout, stage, learner.lora)
    copied = 0
    if shape.tied and 0 < stage == layout.pipeline - 1:  # the first stage writes the embedding for both
        copied = shape.padded_vocabulary(layout.tensor) // layout.tensor * shape.hidden
    critic = critic_shape(config, shape)
    valued = 0 if critic is None else _whole_bytes(config, machines, of_critic(critic, layout, stage))
    if not learner.lora.rank:
        return valued + _whole_bytes(config, machines, counted + Parameters(dense=-copied))
    item, (copies, expert_copies) = ITEM[config.model.dtype], _copies(learner)
    shared = item * (counted.dense - copied + counted.adapters) + _state(config, machines) * counted.adapters
    return valued + math.ceil(shared / copies) + math.ceil(item * counted.expert / expert_copies)


def _whole_bytes(config: Config, machines: Machines, counted: Parameters) -> int:
    """Bytes of a model all of which is trained."""
    each = ITEM[config.model.dtype] + _state(config, machines)
    copies, expert_copies = _copies(config.learner)
    return math.ceil(each * counted.dense / copies) + math.ceil(each * counted.expert / expert_copies)


def _state(config: Config, machines: Machines) -> int:
    """Bytes of the optimizer's state for a parameter."""
    alone = config.model.dtype == "float32" and not is_distributed(config, machines)
    return MOMENTS if alone else MASTER + MOMENTS


def _copies(learner: LearnerConfig) -> tuple[int, int]:
    """Ranks that have the same parameters, and the same experts."""
    layout = learner.layout
    return (
        learner.ranks // (layout.tensor * layout.pipeline),
        learner.ranks // (layout.expert * layout.expert_tensor * layout.pipeline),
    )


def exported_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of the exported Hugging Face folder, adapters merged in, and of PEFT's folder beside it."""
    adapters = whole_adapters(shape, config.learner.lora) if config.learner.lora.rank else 0
    return (whole_model(shape) + adapters) * ITEM[config.model.dtype]
