"""Where the roles of a run go: ranks and generator workers on nodes and their GPUs, as a pure function.

learner nodes              0 .. L-1    ranks evenly, on the first GPUs; the replay service on node 0
run.placement=shared       0 .. L-1    the workers from the first GPU on, too
nodes of the generators    L .. N-1    each worker on the first node with GPUs enough for its servers; the parts of a
                                       server over several nodes on the first ones, one on each
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig

from .description import Description


@dataclass(frozen=True, slots=True)
class Worker:
    """A generator worker and the GPUs of its servers; or, with a `rank` above 0, a further node of its one server.

    Example: `Worker(index=3, pool="", node=5, gpus=(4, 5, 6, 7))`; on nodes without GPUs `gpus` is empty.
    """

    index: int
    pool: str
    node: int
    gpus: tuple[int, ...]
    rank: int = 0  # of this node among those of the server

    @property
    def name(self) -> str:
        """Of its role. Example: `generator-3`, `generator-3-node-1`."""
        return f"generator-{self.index}" + (f"-node-{self.rank}" if self.rank else "")


@dataclass(frozen=True, slots=True)
class Placement:
    """Of a whole run."""

    nodes: int
    learner_nodes: int
    ranks: int  # of the learner on each of its nodes
    workers: tuple[Worker, ...]

    def on(self, node: int) -> tuple[Worker, ...]:
        """The workers of a node."""
        return tuple(worker for worker in self.workers if worker.node == node)

    def gpus(self, node: int) -> int:
        """GPUs of a node that are in use by generators."""
        return sum(len(worker.gpus) for worker in self.on(node))


def place(description: Description, config: Config, *, pods: bool = False) -> Placement:
    """Raises ConfigError, with what would do, where something does not fit.

    `pods`: each worker is a pod that a scheduler puts on a node; it has only to fit on one, and is on none here.
    """
    ranks = _ranks(description, config)
    if config.run.shares_devices and (pods or description.generators is not None):
        raise ConfigError(
            "generators: learner and servers take turns on the learner's nodes with run.placement=shared; allowed: "
            "null, on nodes that are no pods"
        )
    if pods:
        gpus = (description.generators or description.learner).gpus
        largest = max(pool.gpus for pool in config.generate.each_pool)
        if 0 < gpus < largest:
            raise ConfigError(f"generators.gpus: {gpus} of a node are too few for a worker; allowed: from {largest} on")
        return Placement(description.nodes, description.learner.nodes, ranks, ())
    if description.generators is None:
        nodes, gpus = list(range(description.learner.nodes)), description.learner.gpus
        first = 0 if config.run.shares_devices else ranks
    else:
        nodes = list(range(description.learner.nodes, description.nodes))
        gpus, first = description.generators.gpus, 0
    free = {node: list(range(first, gpus)) for node in nodes}
    workers = _fill(config, free) if gpus else _spread(config, nodes)
    return Placement(description.nodes, description.learner.nodes, ranks, tuple(workers))


def _ranks(description: Description, config: Config) -> int:
    """Of the learner on each of its nodes."""
    nodes, gpus, ranks = description.learner.nodes, description.learner.gpus, config.learner.ranks
    if ranks % nodes:
        raise ConfigError(
            f"learner.nodes: learner.ranks={ranks} do not divide over {nodes} nodes; allowed: a divisor of {ranks}"
        )
    if gpus and ranks // nodes > gpus:
        raise ConfigError(
            f"learner.nodes: {nodes} nodes of {gpus} GPUs have no room for learner.ranks={ranks}; "
            f"allowed: from {-(-ranks // gpus)} on"
        )
    return ranks // nodes


def _pools(config: Config) -> list[GenerateConfig]:
    """The pool of every worker."""
    return [pool for pool in config.generate.each_pool for _ in range(pool.workers)]


def _spread(config: Config, nodes: list[int]) -> list[Worker]:
    pools = _pools(config)
    parts = [(index, pool, rank) for index, pool in enumerate(pools) for rank in range(pool.server_nodes)]
    _refuse_too_few(pools, len(nodes))
    workers, former = [], 0
    for place, (index, pool, rank) in enumerate(parts):
        even = place * len(nodes) // len(parts)
        former = even if rank == 0 else (former + 1) % len(nodes)  # no two parts of a server on one node
        workers.append(Worker(index, pool.name, nodes[former], (), rank))
    return workers


def _fill(config: Config, free: dict[int, list[int]]) -> list[Worker]:
    """First fit; takes what it gives away out of `free`."""
    workers, pools = [], _pools(config)
    room, every = sum(map(len, free.values())), sum(pool.gpus * pool.server_nodes for pool in pools)
    _refuse_too_few(pools, len(free))
    for index, pool in enumerate(pools):
        nodes = [node for node, gpus in free.items() if len(gpus) >= pool.gpus][: pool.server_nodes]
        if len(nodes) < pool.server_nodes:
            where = "of one node" if pool.server_nodes == 1 else f"on each of {pool.server_nodes} nodes"
            raise ConfigError(
                f"generators: worker {index} needs {pool.gpus} GPUs {where}, and {len(nodes) or 'none'} of {len(free)} "
                f"nodes {'have' if len(nodes) > 1 else 'has'} them left; allowed: more than {room} GPUs for the "
                f"{every} of all workers"
            )
        for rank, node in enumerate(nodes):
            workers.append(Worker(index, pool.name, node, tuple(free[node][: pool.gpus]), rank))
            del free[node][: pool.gpus]
    return workers


def _refuse_too_few(pools: list[GenerateConfig], nodes: int) -> None:
    if (needed := max(pool.server_nodes for pool in pools)) > nodes:
        raise ConfigError(
            f"generate.server_nodes: {needed} nodes of a server are more than the {nodes} of the generators; allowed: "
            f"up to {nodes}"
        )
