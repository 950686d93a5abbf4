"""The whole plan: checks first, then processes, memory, traffic, the bound, speed, and what will limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.lab.plan import fit, reward_models
from streamrl.lab.plan.generators import Pool, pools
from streamrl.lab.plan.learner_memory import RankMemory, fullest_rank
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.lab.plan.placement import Host, place
from streamrl.lab.plan.saves import Save, exported_bytes, saves, seconds
from streamrl.lab.plan.speed import Expected, expected
from streamrl.lab.plan.traffic import (
    Link,
    PublishTime,
    links,
    publish_times,
    published_bytes,
)
from streamrl.learner.shape import ModelShape
from streamrl.preflight.lengths import check_lengths
from streamrl.preflight.model import check_model
from streamrl.preflight.prompts import Longest
from streamrl.preflight.wire import GroupBytes, check_wire, group_bytes
from streamrl.publish.transports import transport_of
from streamrl.replay.orders import make_order

# Share of what a rank may take above which its memory is reported as a limit.
FULL = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launch will use."""

    hosts: list[Host]
    rank: RankMemory  # the fullest one of the learner
    pools: list[Pool]
    group: GroupBytes
    weights: int  # bytes of one version
    first_host: int  # bytes of host memory where rank 0 and the replay service are
    saves: list[Save]  # of one checkpoint, by host
    model: int  # bytes of RUN/model and RUN/adapter, written once, at the end
    links: list[Link]
    publishing: list[PublishTime]
    slots: int  # groups that may be out
    bound: int | None  # learner steps that a trained token may be old at the most; None: no bound
    expected: Expected | None  # None: nobody gave figures
    limits: list[str]

    @property
    def servers(self) -> int:
        return sum(pool.all_servers for pool in self.pools)

    def as_json(self) -> dict[str, Any]:
        return {
            "hosts": [host.as_json() for host in self.hosts],
            "learner_rank": self.rank.as_json(),
            "pools": [pool.as_json() for pool in self.pools],
            "group_bytes": asdict(self.group),
            "version_bytes": self.weights,
            "first_host_bytes": self.first_host,
            "checkpoint": [each.as_json() for each in self.saves],
            "model_bytes": self.model,
            "links": [link.as_json() for link in self.links],
            "publish": [each.as_json() for each in self.publishing],
            "slots": self.slots,
            "bound": self.bound,
            "expected": None if self.expected is None else self.expected.as_json(),
            "limits": self.limits,
        }


def make_plan(config: Config, shape: ModelShape, machines: Machines, figures: Path | None = None) -> Plan:
    """Work everything out. Raises ConfigError with one line for what cannot run, which says what would.

    `figures`: a file as `streamrl simulate --fleet` takes it; None: the speed is not known.
    """
    check_model(config, shape)
    check_lengths(config, shape, Longest(tokens=machines.prompt, whose="a prompt (--prompt)"))
    group = group_bytes(config, shape, machines.prompt)
    check_wire(config, group)
    found = pools(config, shape, machines)
    fit.check_servers(config, list(zip(config.generate.each_pool, found, strict=True)), shape, machines)
    rank = fullest_rank(config, shape, machines)
    fit.check_learner(config, rank, shape, machines)
    fit.check_shared(config, rank, found, machines)
    hosts = place(config.learner.ranks, found, machines, shared=config.run.shares_devices)
    weights, servers = published_bytes(config, shape), sum(pool.all_servers for pool in found)
    apart = any(host.workers for host in hosts[1:])
    times = publish_times(config, shape, weights, servers, machines, hosts=len(hosts), apart=apart)
    _check_transport(times)
    speed = None if figures is None else expected(config, figures, machines)
    rates = None if speed is None else (speed.figures.generated, 1.0 / speed.step_seconds)
    saved = saves(config, shape, machines, hosts)
    taken = [
        _host_memory(config, rank, host, weights, save) + (0 if index else _buffer(config, weights, group))
        for index, (host, save) in enumerate(zip(hosts, saved, strict=True))
    ]
    taken[0] += _on_host(config, rank, found, machines) + reward_models.host_bytes(config, machines)
    plan = Plan(
        hosts=hosts,
        rank=rank,
        pools=found,
        group=group,
        weights=weights,
        first_host=taken[0],
        saves=saved,
        model=exported_bytes(config, shape) if config.checkpoint.export else 0,
        links=links(config, group, weights, servers, rates),
        publishing=times,
        slots=config.replay.slots,
        bound=make_order(config.replay, config.publish.every).worst_staleness,
        expected=speed,
        limits=[],
    )
    _check_hosts(plan, taken, machines)
    plan.limits.extend(limits(plan, config, machines))
    return plan


def limits(plan: Plan, config: Config, machines: Machines) -> list[str]:
    """What will hold the run up first, in words; what the speeds say comes last."""
    lines = []
    if machines.has_gpus and plan.rank.peak > FULL * machines.device_bytes:
        lines.append(
            f"the learner's memory: {plan.rank.peak / GIB:.1f} of {machines.device_bytes / GIB:.1f} GiB a rank; "
            "a larger learner.tokens_per_micro_batch will not fit"
        )
    if config.learner.layout.tensor > machines.gpus_per_host > 0:
        lines.append(
            f"learner.layout.tensor: {config.learner.layout.tensor} ranks cross hosts of {machines.gpus_per_host} "
            "GPUs; every layer waits for the network"
        )
    for pool in plan.pools:
        lines += _pool_limits(pool)
    wanted = sum(pool.workers * pool.groups for pool in plan.pools)
    if wanted > plan.slots:
        lines.append(
            f"slots: the generators take {wanted} groups at once, replay.max_staleness={config.replay.bound:g} lets "
            f"{plan.slots} be out"
        )
    lines += reward_models.line(config, machines)
    return lines + _save_limits(plan, config, machines) + _speed_limits(plan, config)


def _pool_limits(pool: Pool) -> list[str]:
    named = f" of pool {pool.name}" if pool.name else ""
    if pool.at_once >= pool.asked:
        return []
    if pool.at_once < pool.tokens // pool.longest:
        return [f"max_running_requests{named}: {pool.at_once}, and a server is asked for {pool.asked} answers at once"]
    return [
        f"KV cache{named}: a server is asked for {pool.asked} answers at once and runs {pool.at_once} of the longest; "
        "more run while answers are shorter"
    ]


def _save_limits(plan: Plan, config: Config, machines: Machines) -> list[str]:
    takes = seconds(plan.saves, machines)
    if takes <= config.checkpoint.timeout:
        return []
    return [
        f"checkpoint.timeout: a checkpoint takes {takes:.0f} s at the file system's {machines.disk:g} GB/s, and may "
        f"take {config.checkpoint.timeout:g}"
    ]


def _speed_limits(plan: Plan, config: Config) -> list[str]:
    if plan.expected is None:
        return ["tokens/s: not known without figures of these GPUs (--figures FILE)"]
    figures, lines = plan.expected.figures, []
    used = next(each for each in plan.publishing if each.used)
    if used.round > plan.expected.step_seconds * config.publish.every:
        lines.append(
            f"publishing: a round over {plan.servers} servers takes {used.round:.1f} s, a version comes every "
            f"{plan.expected.step_seconds * config.publish.every:.1f} s"
        )
    if figures.idle_learner >= figures.idle_generator:
        lines.append(f"generation: the learner idles {figures.idle_learner:.0%} of the time")
    else:
        lines.append(f"the learner: generators idle {figures.idle_generator:.0%} of the time")
    return lines


def _host_memory(config: Config, rank: RankMemory, host: Host, weights: int, save: Save) -> int:
    """Bytes on a host while a checkpoint is written: the ranks' own, their copies for it, and its servers'."""
    return transport_of(config).server_copies * weights * host.servers + host.learner_ranks * rank.host + save.held


def _buffer(config: Config, weights: int, group: GroupBytes) -> int:
    """What the first host has besides: staging copies of rank 0, and all groups of the buffer at their longest."""
    return transport_of(config).staged_copies * weights + config.replay.slots * group.longest


def _on_host(config: Config, rank: RankMemory, pools: list[Pool], machines: Machines) -> int:
    """Without GPUs ranks and servers are in the host's memory, too."""
    if machines.has_gpus:
        return 0
    own = [pool for pool in pools if not pool.attached]
    servers = sum(pool.all_servers * (pool.weights + pool.tokens * pool.token) * pool.ranks for pool in own)
    return config.learner.ranks * rank.peak + servers


def _check_transport(times: list[PublishTime]) -> None:
    used = next(each for each in times if each.used)
    if used.impossible:
        others = ", ".join(each.transport for each in times if not each.impossible)
        raise ConfigError(f"publish.transport: {used.transport}: {used.impossible}; allowed: {others}")


def _check_hosts(plan: Plan, taken: list[int], machines: Machines) -> None:
    limit = machines.host_memory * GIB
    if taken[0] > limit:
        raise ConfigError(
            f"--host-memory: the first host needs {taken[0] / GIB:.0f} GiB for staging copies, the ranks' host "
            f"memory, {plan.saves[0].held / GIB:.0f} GiB of a checkpoint and {plan.slots} groups of up to "
            f"{plan.group.longest / GIB:.2f} GiB, and has {machines.host_memory:g}; allowed: larger hosts, a smaller "
            "replay.max_staleness, or shorter answers"
        )
    host = max(range(len(taken)), key=taken.__getitem__)
    if taken[host] > limit:
        raise ConfigError(
            f"--host-memory: host {host} needs {taken[host] / GIB:.0f} GiB for its processes and "
            f"{plan.saves[host].held / GIB:.0f} GiB of a checkpoint, and has {machines.host_memory:g}; allowed: larger "
            "hosts, a learner of more ranks, or fewer servers on a host"
        )
