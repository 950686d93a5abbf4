"""Which process is on which host: the replay service and the learner first, then worker after worker where room is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamrl.config.file import ConfigError
from streamrl.lab.plan.generators import Pool
from streamrl.lab.plan.machines import Machines


@dataclass(slots=True)
class Host:
    """One host and what it runs."""

    gpus: int  # taken
    learner_ranks: int = 0
    first_rank: int = 0
    workers: list[int] = field(default_factory=list)  # numbers, as `streamrl generator --index` takes them
    worker_gpus: list[tuple[int, ...]] = field(default_factory=list)  # of each of them
    further: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)  # worker, node of its server, GPUs
    servers: int = 0
    replay: bool = False

    @property
    def words(self) -> str:
        """What it runs. Example: `replay service, learner ranks 0-7`."""
        roles = ["replay service"] if self.replay else []
        if self.learner_ranks:
            on = f" on {_range('GPU', 0, self.learner_ranks)}" if self.gpus else ""
            roles.append(f"learner {_range('rank', self.first_rank, self.learner_ranks)}{on}")
        if self.workers:
            servers = f"{self.servers} server{'s' * (self.servers != 1)}"
            taken = [gpu for gpus in self.worker_gpus for gpu in gpus]
            on = f" on {_range('GPU', taken[0], len(taken))}" if taken else ""
            roles.append(f"generator{'s' * (len(self.workers) > 1)} {_numbers(self.workers)} ({servers}{on})")
        for worker, node, gpus in self.further:
            on = f" on {_range('GPU', gpus[0], len(gpus))}" if gpus else ""
            roles.append(f"node {node} of the server of generator {worker}{on}")
        return ", ".join(roles)

    def as_json(self) -> dict[str, Any]:
        ranks = list(range(self.first_rank, self.first_rank + self.learner_ranks))
        return {
            "gpus": self.gpus, "replay": self.replay, "learner_ranks": ranks, "generators": self.workers,
            "servers": self.servers, "generator_gpus": self.worker_gpus, "further_nodes": self.further,
        }  # fmt: skip


def place(ranks: int, pools: list[Pool], machines: Machines, *, shared: bool = False) -> list[Host]:
    """The hosts of a run. Raises ConfigError for a worker that no host has room for, and for too few hosts.

    The learner fills hosts in the order of its ranks, as torchrun does with as many ranks on each. A worker and its
    servers are on one host, but for a server over several nodes, which are as many hosts; `shared`: on GPUs on which
    ranks are, too (`run.placement`).
    """
    hosts = _learner_hosts(ranks, machines)
    hosts[0].replay = True
    taken = [0 if shared else host.gpus for host in hosts]  # by ranks that a server cannot be beside, and by servers
    number = 0
    for pool in pools:
        needed = 0 if pool.attached else pool.servers * pool.gpus
        if needed > machines.gpus_per_host:
            raise ConfigError(
                f"generate.tensor_parallel: {pool.servers} servers of {pool.gpus} GPUs for one worker do not fit on a "
                f"host of {machines.gpus_per_host}; allowed: servers x tensor_parallel up to {machines.gpus_per_host}, "
                "or a server over several hosts (generate.server_nodes)"
            )
        for _ in range(pool.workers):
            for node, place in enumerate(_places(taken, needed, pool.nodes, machines)):
                if place == len(hosts):
                    hosts.append(Host(gpus=0))
                    taken.append(0)
                host, gpus = hosts[place], tuple(range(taken[place], taken[place] + needed))
                if node == 0:
                    host.workers.append(number)
                    host.worker_gpus.append(gpus)
                    host.servers += 0 if pool.attached else pool.servers
                else:
                    host.further.append((number, node, gpus))
                taken[place] += needed
                host.gpus = max(host.gpus, taken[place])
            number += 1
    if machines.hosts and len(hosts) > machines.hosts:
        all_gpus = sum(pool.all_servers * pool.nodes * pool.gpus for pool in pools)
        raise ConfigError(
            f"--hosts: {machines.hosts} hosts of {machines.gpus_per_host} GPUs are fewer than the {len(hosts)} that "
            f"{ranks} learner ranks and {all_gpus} GPUs of servers need; "
            "allowed: fewer of learner.ranks or generate.workers"
        )
    return hosts


def _places(taken: list[int], needed: int, nodes: int, machines: Machines) -> list[int]:
    """So many different hosts, the first ones with room for `needed` GPUs; those that are not there yet are new."""
    room = [place for place, gpus in enumerate(taken) if gpus + needed <= machines.gpus_per_host]
    return [*room, *range(len(taken), len(taken) + nodes)][:nodes]


def _learner_hosts(ranks: int, machines: Machines) -> list[Host]:
    if not machines.has_gpus:
        return [Host(gpus=0, learner_ranks=ranks)]
    hosts = []
    for first in range(0, ranks, machines.gpus_per_host):
        count = min(machines.gpus_per_host, ranks - first)
        hosts.append(Host(gpus=count, learner_ranks=count, first_rank=first))
    return hosts


def _range(word: str, first: int, count: int) -> str:
    return f"{word} {first}" if count == 1 else f"{word}s {first}-{first + count - 1}"


def _numbers(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
