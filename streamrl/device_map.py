"""Which GPU of a host each process of a run gets, as a pure function: no two of them share one, unless they take turns.

    learner ranks        the first GPUs, one each, in the order of the ranks
    generator workers    those behind them, in the order of their numbers, each server's side by side
    reward models        those behind these, as many as `reward_model.gpus` each
    run.placement=shared the workers' begin with the first GPU, too: a rank and a server take turns on it

A GPU is its position among those that may be used here: those of CUDA_VISIBLE_DEVICES, or all. `streamrl train` gives
every process its own by that variable, and a worker divides what it sees among its servers in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig

Gpu = TypeVar("Gpu")


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The GPUs of a run on one host, by their indices."""

    ranks: tuple[int, ...]  # the GPU of each learner rank
    workers: tuple[tuple[tuple[int, ...], ...], ...]  # by worker and server; () for a worker that starts no servers
    reward_models: tuple[tuple[int, ...], ...] = ()  # of each process; () for one on cores


def device_map(config: Config, gpus: int) -> DeviceMap:
    """The map of a host with so many GPUs, 1 or more. Raises ConfigError, with what would do, where they are too few.

    >>> device_map(Config.model_validate({"generate": {"servers": 2}}), gpus=4)
    DeviceMap(ranks=(0,), workers=(((1,), (2,)),), reward_models=())
    """
    ranks, pools = config.learner.ranks, config.generate.each_pool
    first = 0 if config.run.shares_devices else ranks
    needed = first + sum(pool.workers * pool.gpus for pool in pools)
    judging = config.reward_model.processes * config.reward_model.gpus
    if ranks > gpus:
        raise ConfigError(f"learner.ranks: {ranks} need a GPU each, and this machine has {gpus}; allowed: up to {gpus}")
    if needed > gpus:
        beside = "" if config.run.shares_devices else f" beside the {ranks} of the learner"
        raise ConfigError(
            f"generate.workers: servers need {needed - first} GPUs{beside}, and this machine has {gpus}; allowed: "
            "fewer of generate.workers, generate.servers or generate.tensor_parallel, or several machines "
            "(docs/launch.md)"
        )
    behind = max(needed, ranks)
    if behind + judging > gpus:
        raise ConfigError(
            f"reward_model.gpus: {judging} GPUs beside the {behind} of the learner and the servers, and this machine "
            f"has {gpus}; allowed: fewer of reward_model.workers or reward_model.gpus (0: on cores)"
        )
    _refuse_two_ends_on_one_device(config)
    free = iter(range(first, needed))
    workers = [
        tuple(divide([next(free) for _ in range(pool.gpus)], pool)) for pool in pools for _ in range(pool.workers)
    ]
    size = config.reward_model.gpus
    models = tuple(
        tuple(range(behind + index * size, behind + (index + 1) * size))
        for index in range(config.reward_model.processes)
    )
    return DeviceMap(tuple(range(ranks)), tuple(workers), models)


def _refuse_two_ends_on_one_device(config: Config) -> None:
    if not config.run.shares_devices or config.learner.lora.by_adapter:
        return
    if not config.publish.chosen("transport").one_device:
        others = [name for name in TRANSPORTS.names if TRANSPORTS.load(name).one_device]
        raise ConfigError(
            f"publish.transport: {config.publish.transport} cannot reach a server on the learner's own GPU, as in "
            f"run.placement=shared; allowed: {', '.join(others)}"
        )


def divide(gpus: Sequence[Gpu], pool: GenerateConfig) -> list[tuple[Gpu, ...]]:
    """The GPUs of each server of a worker of this pool, on one of its nodes.

    Raises ConfigError where they are too few for all.
    """
    if len(gpus) < pool.gpus:
        raise ConfigError(
            f"generate.servers: the {pool.servers} servers of a worker need {pool.gpus} GPUs, and it may use "
            f"{len(gpus)}; allowed: fewer servers, or more in CUDA_VISIBLE_DEVICES"
        )
    size = pool.tensor_parallel // pool.server_nodes
    return [tuple(gpus[first : first + size]) for first in range(0, pool.gpus, size)]
