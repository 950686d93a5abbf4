"""What crosses each link, and how long a publish takes by each transport at the speeds that the user gives.

generators ──groups──▶ replay service ──batches──▶ learner ──weights──▶ generators
                             └──groups──▶ journal
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from streamrl.config import Config
from streamrl.lab.plan.learner_memory import ITEM
from streamrl.lab.plan.machines import GB, Machines
from streamrl.lab.plan.parameters import whole_adapters, whole_model
from streamrl.learner.shape import ModelShape
from streamrl.preflight.wire import GroupBytes

Transport = Literal["broadcast", "disk", "memory", "delta"]

STAGED: dict[str, int] = {"broadcast": 1, "disk": 1, "memory": 2, "delta": 2}
"""Copies of the weights in the memory of the learner's first host (docs/publish.md)."""


@dataclass(frozen=True, slots=True)
class Link:
    """What goes from one role to another."""

    source: str
    target: str
    step: int  # bytes of a learner step at the most, when every answer is cut; of weights: of a publish
    rate: float | None  # bytes/s as expected; None: nobody gave figures

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PublishTime:
    """One version by one transport, in seconds."""

    transport: str
    copy: float  # the learner stands still
    pause: float  # one server stands still
    round: float  # until the last server has it
    impossible: str = ""  # why it cannot be used

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def published_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one version: the whole model, or the adapters."""
    lora = config.learner.lora
    count = whole_adapters(shape, lora) if lora.by_adapter else whole_model(shape)
    return count * ITEM[config.model.dtype]


def links(
    config: Config, group: GroupBytes, weights: int, servers: int, rates: tuple[float, float] | None
) -> list[Link]:
    """Every link. `rates`: generated tokens/s and steps/s, where they are known."""
    groups = config.replay.groups_per_step
    rollouts = group.longest * groups
    flow = None if rates is None else rates[0] * group.token + rates[1] * groups * group.fixed
    publishes = None if rates is None else rates[1] / config.publish.every * weights * servers
    found = [
        Link("generators", "replay service", rollouts, flow),
        Link("replay service", "learner", rollouts, flow),
        Link("learner", "servers", weights * servers, publishes),
    ]
    if config.journal.keep != "none":
        found.insert(1, Link("replay service", "journal on disk", rollouts, flow))
    return found


def publish_times(
    config: Config, weights: int, servers: int, machines: Machines, *, hosts: int, apart: bool
) -> list[PublishTime]:
    """Each transport. `apart`: servers are on another host than the learner's first rank."""
    if config.learner.lora.by_adapter:
        each = weights / GB / machines.network
        return [PublishTime("adapter", weights / GB / _copy(machines), 0.0, servers * each)]
    return list(_whole(config, weights / GB, servers, machines, hosts=hosts, apart=apart))


def _whole(
    config: Config, size: float, servers: int, machines: Machines, *, hosts: int, apart: bool
) -> Iterator[PublishTime]:
    """Whole weights of `size` GB. The formulas are in docs/plan.md."""
    moved = size / _copy(machines)
    across = size / machines.network if apart else 0.0
    read, turns = size / machines.disk, math.ceil(servers / config.publish.at_once)
    for transport in get_args(Transport):
        match transport:
            case "broadcast":
                each = moved + across
                yield PublishTime(transport, moved, each, servers * each)
            case "disk":
                yield PublishTime(transport, moved, read * config.publish.at_once, read + 2 * servers * read)
            case "memory":
                why = f"learner and servers are on {hosts} hosts" if hosts > 1 else ""
                yield PublishTime(transport, moved, moved, turns * moved, why)
            case "delta":
                scan = size / machines.memory
                each = machines.changed * across + scan + moved
                yield PublishTime(transport, moved, moved, scan + servers * each)


def _copy(machines: Machines) -> float:
    """GB/s into a server's or out of the learner's memory."""
    return machines.copy if machines.has_gpus else machines.memory
