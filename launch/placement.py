"""Where the roles of a run go: ranks and generator workers on nodes and their GPUs, as a pure function.

learner nodes              0 .. L-1    ranks evenly, on the first GPUs; the replay service on node 0
run.placement=shared       0 .. L-1    the workers from the first GPU on, too
nodes of the generators    L .. N-1    each worker on the first node with GPUs enough for its servers
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.description import Description
from streamrl.config import Config
from streamrl.config.file import ConfigError


@dataclass(frozen=True, slots=True)
class Worker:
    """A generator worker and the GPUs of its servers.

    Example: `Worker(index=3, pool="", node=5, gpus=(4, 5, 6, 7))`; on nodes without GPUs `gpus` is empty.
    """

    index: int
    pool: str
    node: int
    gpus: tuple[int, ...]


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
        largest = max(needed for _, needed in _pools(config))
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


def _pools(config: Config) -> list[tuple[str, int]]:
    """The pool and the needed GPUs of every worker; servers that it attaches to run elsewhere."""
    return [(pool.name, pool.gpus) for pool in config.generate.each_pool for _ in range(pool.workers)]


def _spread(config: Config, nodes: list[int]) -> list[Worker]:
    pools = _pools(config)
    return [Worker(index, pool, nodes[index * len(nodes) // len(pools)], ()) for index, (pool, _) in enumerate(pools)]


def _fill(config: Config, free: dict[int, list[int]]) -> list[Worker]:
    """First fit; takes what it gives away out of `free`."""
    workers = []
    room = sum(map(len, free.values()))
    for index, (pool, needed) in enumerate(_pools(config)):
        node = next((node for node, gpus in free.items() if len(gpus) >= needed), None)
        if node is None:
            raise ConfigError(
                f"generators: worker {index} needs {needed} GPUs of one node, and none of {len(free)} nodes has them "
                f"left; allowed: more than {room} GPUs for the {sum(need for _, need in _pools(config))} of all workers"
            )
        workers.append(Worker(index, pool, node, tuple(free[node][:needed])))
        del free[node][:needed]
    return workers
