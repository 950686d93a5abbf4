"""What this machine must have where `train` starts all processes of a run here: packages, memory, cores, GPUs.

A cluster's roles are started one by one, and each machine has what its role needs: none of this is asked there, but
for the packages of the role.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence

import psutil

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig
from streamrl.device_map import device_map
from streamrl.engine.hardware import bfloat16_instructions, has_cuda, visible_gpus
from streamrl.learner.megatron_fields import fp8
from streamrl.learner.shape import read_shape
from streamrl.preflight import drafts

GIB = 1 << 30

# GiB of host memory that a rank of a server, a rank of the learner and a worker take at the least, before a model: what
# they share with no other process. With a tiny model on a CPU it is 1.2, 0.3 and 0.1.
SERVER = 0.5
RANK = 0.25
WORKER = 0.05

# Processes that want a core of their own for each core: above it most of the time goes into waiting for a turn.
CROWDED = 4

FLOAT32 = ("float32", "float")  # SGLang's names of it


def check_generator(pools: Sequence[GenerateConfig]) -> None:
    """Refuse generators that would start servers which are not installed. Raises ConfigError."""
    if any(not pool.attach for pool in pools) and not _is_installed("sglang"):
        raise ConfigError(
            "generate.attach: [] starts SGLang servers, and SGLang is not installed here; allowed: an installation "
            "(`streamrl doctor` says how), or addresses of running servers"
        )


def check_learner() -> None:
    """Refuse a learner without Megatron-Core. Raises ConfigError."""
    if not _is_installed("megatron"):
        raise ConfigError(
            "learner: Megatron-Core is not installed here; allowed: an installation (`streamrl doctor` says how)"
        )


def check_learner_alone(config: Config) -> None:
    """Refuse a run of `streamrl sft` whose ranks this machine cannot hold. Raises ConfigError."""
    check_learner()
    if has_cuda() and config.learner.ranks > (gpus := len(visible_gpus())):
        raise ConfigError(
            f"learner.ranks: {config.learner.ranks} need a GPU each, and this machine has {gpus}; allowed: up to {gpus}"
        )


def check_served(config: Config) -> None:
    """Refuse servers of the run's own on GPUs in a dtype that SGLang's norms do not have there. Raises ConfigError."""
    for pool in config.generate.each_pool:
        given = pool.sglang_arguments.get("dtype")
        dtype = config.model.dtype if given is None else given
        if dtype in FLOAT32 and not pool.attach:
            said = f"model.dtype: {dtype}" if given is None else f"generate.server_args: dtype={dtype}"
            allowed = "auto, bfloat16" if given is None else "bfloat16"
            raise ConfigError(
                f"{said} cannot be served on a GPU, where SGLang's norms take 16 bits; allowed: {allowed}, or "
                "generate.attach"
            )


def check_machine(config: Config) -> None:
    """Refuse a run whose processes this machine cannot hold. Raises ConfigError."""
    if (nodes := config.generate.most_nodes) > 1:
        raise ConfigError(
            f"generate.server_nodes: a server over {nodes} nodes is started on all of them, and `train` starts this "
            "machine alone; allowed: 1, or python -m streamrl.launch.render (docs/launch.md)"
        )
    check_generator(config.generate.each_pool)
    check_learner()
    drafts.check_machine(config)
    if not has_cuda():
        _check_prefills(config)
    servers, workers, ranks = _processes(config)
    if (asked := fp8(config)) is not None and not has_cuda():
        raise ConfigError(
            f"{asked} needs Transformer Engine's layers on GPUs, and this machine has none; allowed: null"
        )
    if has_cuda():
        check_served(config)
        device_map(config, len(visible_gpus()))
    elif config.generate.quantization is not None and read_shape(config.model.path, family=config.model.built_by).moe:
        raise ConfigError(
            f"generate.quantization: {config.generate.quantization} of a mixture of experts needs a GPU, and this "
            "machine has none; allowed: null"
        )
    needed, memory = servers * SERVER + workers * WORKER + ranks * RANK, psutil.virtual_memory().total / GIB
    if needed > memory:
        key, count = ("generate.workers", workers) if servers * SERVER > ranks * RANK else ("learner.ranks", ranks)
        raise ConfigError(
            f"{key}: {count} are too many here: {servers} ranks of servers, {workers} workers and {ranks} ranks of the "
            f"learner take {needed:.0f} GiB at the least, and this machine has {memory:.0f}; allowed: fewer, or "
            "several machines (docs/launch.md)"
        )


def _check_prefills(config: Config) -> None:
    """Refuse servers that would cut the prefills which are to be the learner's pass to the bit. Raises ConfigError."""
    for pool in config.generate.each_pool:
        size = pool.sglang_arguments.get("chunked_prefill_size")
        if pool.score == "full_prefill" and not pool.attach and isinstance(size, int) and size > 0:
            raise ConfigError(
                f"generate.server_args: chunked_prefill_size={size} cuts prefills, and what is behind a cut is rounded "
                "otherwise than generate.score=full_prefill says; allowed: -1, or leave it out"
            )


def crowding(config: Config) -> Iterator[str]:
    """A line where so many processes share so few cores that the run will crawl."""
    servers, _, ranks = _processes(config)
    cores, busy = len(os.sched_getaffinity(0)), servers + ranks
    if not has_cuda() and busy > CROWDED * cores:
        yield (
            f"learner.ranks, generate.workers: {ranks} ranks and {servers} servers share the {cores} cores of this "
            "machine: most of their time goes into waiting for one"
        )


def rounding(config: Config) -> Iterator[str]:
    """A line where the CPU does not multiply what the run is in."""
    if config.model.dtype == "bfloat16" and not has_cuda() and bfloat16_instructions() is None:
        yield (
            "model.dtype: bfloat16 on a CPU without instructions for it, which computes in float32 and rounds each "
            "result; auto is float32 here"
        )


def _processes(config: Config) -> tuple[int, int, int]:
    """Ranks of own servers, workers, ranks of the learner."""
    servers = sum(pool.workers * pool.gpus for pool in config.generate.each_pool)
    return servers, config.workers, config.learner.ranks


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
