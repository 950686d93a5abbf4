"""What crosses each link, and how long a publish takes by each transport at the speeds that the user gives.

generators ──groups──▶ replay service ──batches──▶ learner ──weights──▶ generators
                             └──groups──▶ journal
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from streamrl.config import Config
from streamrl.lab.plan.learner_memory import ITEM
from streamrl.lab.plan.machines import GB, Machines
from streamrl.lab.plan.parameters import whole_adapters, whole_model
from streamrl.learner.shape import ModelShape
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

TOKEN = 8
"""Bytes of an output token on the wire: its id and its log-prob (`stream/codec.py`)."""

Transport = Literal["broadcast", "disk", "memory", "delta"]

STAGED: dict[str, int] = {"broadcast": 1, "disk": 1, "memory": 2, "delta": 2}
"""Copies of the weights in the memory of the learner's first host (docs/publish.md)."""


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """What a group takes on the wire. Example: 16 answers of 1,000 tokens take 16,000 x 8 bytes and a header."""

    header: int  # frame 0, as the codec writes it
    prompt: int  # the prompt's ids, and what the router replay says of them
    token: int  # of one output token
    longest: int  # the whole group when every answer is cut

    @property
    def fixed(self) -> int:
        """Bytes of a group besides its output tokens."""
        return self.header + self.prompt


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


def group_bytes(config: Config, shape: ModelShape, machines: Machines) -> GroupBytes:
    """Of a group whose answers are all cut; the header is what the codec makes of such a group."""
    answer = max(pool.sampling.max_new_tokens for pool in config.generate.each_pool)
    size, prompt = config.generate.group_size, machines.prompt
    header, _ = encode_group(zero_group(size, prompt, answer), max_message=1 << 62)
    routing = 0
    if config.learner.router_replay and shape.moe:
        routing = 2 * shape.layers * shape.moe.top_k  # int16 of each layer's experts (streamrl/routing.py)
    folded = answer * math.ceil(prompt / answer) * routing  # of one sample of the group
    fixed = 4 * prompt + folded
    token = TOKEN + routing
    return GroupBytes(len(header), fixed, token, len(header) + fixed + size * answer * token)


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


def zero_group(samples: int, prompt: int, answer: int) -> Group:
    """A group of the usual form whose numbers are all zero."""
    version = PolicyVersion(1000)
    prompt_ids, output_ids = np.zeros(prompt, np.int32), np.zeros(answer, np.int32)
    sample = Sample(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=np.zeros(answer, np.float32),
        loss_mask=np.ones(answer, np.bool_),
        spans=(VersionSpan(version, 0, answer),),
        reward=1.0,
        reward_parts={"exact": 1.0},
    )
    return Group(
        group_id=1 << 20,
        attempt=0,
        task="task",
        prompt_index=1 << 20,
        samples=(sample,) * samples,
        started=1.0,
        finished=2.0,
        worker="generator-0",
        temperature=1.0,
    )
