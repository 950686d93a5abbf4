"""What crosses each link, and how long a publish takes by each transport at the speeds that the user gives.

generators ──groups──▶ replay service ──batches──▶ learner ──weights──▶ generators
                             └──groups──▶ journal

A group is its header, as the codec writes it, 4 bytes a prompt token and 8 an output token; the router replay adds 2
bytes for each layer and expert of a token. The journal gets the same bytes. One version is e x parameters of the whole
model, or the adapters. The seconds of one publish: `times` of each class in `streamrl/publish/transports/`, with the
checksums of a version that is verified. The first version also pins memory. What one GPU of a host sends another, what
a server does with weights that it has, and requests to it are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from streamrl.choices import TRANSPORTS, Options
from streamrl.config import Config
from streamrl.config.learner import LoraConfig
from streamrl.lab.plan.learner_memory import ITEM
from streamrl.lab.plan.machines import GB, Machines
from streamrl.lab.plan.parameters import of_stage, whole_adapters, whole_model
from streamrl.learner.shape import ModelShape
from streamrl.preflight.wire import GroupBytes
from streamrl.publish.transports import transport_of
from streamrl.publish.transports.base import Costs, Transport


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
    copy: float  # the learner waits
    pause: float  # one server is paused
    round: float  # until the last server has it
    impossible: str = ""  # why it cannot be used
    used: bool = False  # it is what the run publishes by

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


def from_other_hosts(config: Config, shape: ModelShape, machines: Machines) -> float:
    """Share of the weights that ranks of other hosts hold, and send to the learner's first rank when they go out."""
    layout, ranks = config.learner.layout, config.learner.ranks
    if not machines.has_gpus:
        return 0.0
    if layout.fully_sharded:  # each rank sends its rows
        return max(0, ranks - machines.gpus_per_host) / ranks
    total = elsewhere = 0
    for stage in range(layout.pipeline):
        first = stage * ranks // layout.pipeline
        rank = of_stage(shape, layout, stage, LoraConfig())
        for part, count in ((rank.dense, layout.tensor), (rank.expert, layout.expert * layout.expert_tensor)):
            total += part * count
            # All of a stage goes to its first rank, and from there to that of the first stage, on the first host.
            apart = sum(member >= machines.gpus_per_host for member in range(first, first + count))
            elsewhere += part * apart
    return elsewhere / total


def publish_times(
    config: Config, shape: ModelShape, weights: int, servers: int, machines: Machines, *, hosts: int, apart: bool
) -> list[PublishTime]:
    """Each transport that the run could have. `apart`: servers are on another host than the learner's first rank."""
    size = weights / GB
    move, hashed = size / _copy(machines), size / machines.hash
    gathered = from_other_hosts(config, shape, machines) * size / machines.network
    costs = Costs(
        copy=max(move, gathered) if _is_waited_for(config, machines) else 0.0,
        move=move,
        pageable=size / (machines.pageable if machines.has_gpus else machines.memory),
        network=size / machines.network,
        across=size / machines.network if apart else 0.0,
        read=size / machines.disk,
        scan=size / machines.memory,
        hash=hashed,
        verify=hashed if config.publish.verify_every else 0.0,
        changed=machines.changed,
        servers=servers,
        at_once=config.publish.at_once,
        beside=machines.has_gpus,
    )
    found = []
    for name, transport in _transports(config):
        times = transport.times(costs)
        impossible = f"learner and servers are on {hosts} hosts" if transport.one_host and hosts > 1 else ""
        used = name == config.publish.transport or config.learner.lora.by_adapter
        found.append(PublishTime(name, times.copy, times.pause, times.round, impossible, used))
    return found


def _transports(config: Config) -> Iterator[tuple[str, Transport]]:
    """Those that are built in, and the run's own; that of adapters where it publishes these."""
    if config.learner.lora.by_adapter:
        yield "adapter", transport_of(config)
        return
    for name in TRANSPORTS.names:
        if name != config.publish.transport:
            yield name, TRANSPORTS.load(name)(Options())
    yield config.publish.transport, transport_of(config)


def _is_waited_for(config: Config, machines: Machines) -> bool:
    """Whether the learner waits while its weights are copied: not where a GPU holds them all as they go out."""
    layout, lora = config.learner.layout, config.learner.lora
    merged = lora.rank > 0 and not lora.by_adapter
    cut = layout.fully_sharded or max(layout.tensor, layout.pipeline, layout.expert) > 1
    return not machines.has_gpus or merged or cut


def _copy(machines: Machines) -> float:
    """GB/s into a server's or out of the learner's memory."""
    return machines.copy if machines.has_gpus else machines.memory
