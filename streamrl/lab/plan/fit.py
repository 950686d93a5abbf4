"""Refusals: what cannot run on these machines, each in one line that says what would.

What would fit the learner is searched for among neighbouring layouts, the fewest changes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from streamrl.config import Config
from streamrl.config.file import ConfigError, as_tree, value_at
from streamrl.config.generate import GenerateConfig
from streamrl.lab.plan.generators import Pool, longest_sequence, pool_of
from streamrl.lab.plan.learner_memory import RankMemory, fullest_rank
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.learner.shape import ModelShape
from streamrl.preflight.model import check_model

# Times that a size of the layout is tried.
LARGER = (1, 2, 4, 8)

# Keys that are changed at once, at the most: what needs more is another configuration.
MOST_CHANGES = 3


def check_servers(
    config: Config, pools: Sequence[tuple[GenerateConfig, Pool]], shape: ModelShape, machines: Machines
) -> None:
    """Refuse a pool whose GPUs cannot hold the weights and one longest sequence. Raises ConfigError."""
    for settings, pool in pools:
        if pool.at_once > 0:
            continue
        sizes = (settings.tensor_parallel * larger for larger in LARGER)
        fits = (
            size
            for size in sizes
            if size <= machines.gpus_per_host * settings.server_nodes
            and _serves(config, settings, size, shape, machines)
        )
        size = next(fits, None)
        named = f" of pool {pool.name}" if pool.name else ""
        needed = pool.weights + pool.longest * pool.token
        raise ConfigError(
            f"generate.tensor_parallel: {settings.tensor_parallel}: a GPU{named} needs {needed / GIB:.1f} GiB for its "
            f"weights and one sequence of {pool.longest} tokens, and has {(pool.cache + pool.weights) / GIB:.1f}; "
            f"allowed: {f'at least {size}' if size else 'larger GPUs (--gpu-memory), or shorter answers'}"
        )


def _serves(config: Config, settings: GenerateConfig, tensor: int, shape: ModelShape, machines: Machines) -> bool:
    if shape.heads % tensor:
        return False
    return pool_of(config, settings.model_copy(update={"tensor_parallel": tensor}), shape, machines).at_once > 0


def check_learner(config: Config, rank: RankMemory, shape: ModelShape, machines: Machines) -> None:
    """Refuse a learner that its GPUs cannot hold. Raises ConfigError, with the nearest layout that would fit."""
    if _holds(config, rank, machines):
        return
    changes = nearest(config, shape, machines)
    would = (
        " ".join(changes) if changes else f"no layout near this one; GPUs of {_wanted(config, rank, machines):.0f} GiB"
    )
    critic = f", {rank.critic / GIB:.1f} of it the critic" if rank.critic else ""
    teacher = f" or {rank.teacher / GIB:.1f} the teacher" if rank.teacher else ""
    gathered = f", {rank.gathered / GIB:.1f} gathered" if rank.gathered else ""
    raise ConfigError(
        f"learner: a rank of stage {rank.stage} needs {rank.peak / GIB:.1f} GiB ({rank.held / GIB:.1f} held{critic}, "
        f"{rank.activations / GIB:.1f} activations, {rank.logprobs / GIB:.1f} log-probs{gathered}{teacher}), and "
        f"may take {machines.device_bytes / GIB:.1f}; what would fit: {would}"
    )


def check_shared(config: Config, rank: RankMemory, pools: Sequence[Pool], machines: Machines) -> None:
    """Refuse turns on GPUs that cannot hold what stays on them (`run.placement: shared`). Raises ConfigError.

    A server keeps its weights in the learner's turn, and the learner what it holds in the servers'.
    """
    if not (config.run.shares_devices and machines.has_gpus):
        return
    for pool in pools:
        training, cache = rank.peak + pool.weights, pool.tokens * pool.token
        if training > machines.device_bytes:
            raise ConfigError(
                f"run.placement: shared: a GPU needs {training / GIB:.1f} GiB in the learner's turn, "
                f"{pool.weights / GIB:.1f} of a server's weights included, and may be filled to "
                f"{machines.device_bytes / GIB:.1f}; allowed: separate, a smaller learner.tokens_per_micro_batch, or a "
                "learner of more ranks"
            )
        room = machines.device_bytes - rank.held - pool.weights
        if cache > room:
            raise ConfigError(
                f"generate.server_args: max_total_tokens: a KV cache of {pool.tokens} tokens takes {cache / GIB:.1f} "
                f"GiB of a GPU, on which run.placement=shared leaves {room / GIB:.1f} beside the learner; allowed: up "
                f"to {room // pool.token}"
            )


def nearest(config: Config, shape: ModelShape, machines: Machines) -> list[str]:
    """The fewest and smallest changes with which the learner fits, as overrides; [] where none of the tried ones."""
    for changes in _neighbours(config, shape, machines):
        changed = _with(config, changes)
        if changed is None:
            continue
        try:
            check_model(changed, shape)
        except ConfigError:
            continue
        if _holds(changed, fullest_rank(changed, shape, machines), machines):
            return [
                f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in changes.items()
            ]
    return []


def _holds(config: Config, rank: RankMemory, machines: Machines) -> bool:
    """On a machine without GPUs all ranks share the host."""
    sharing = 1 if machines.has_gpus else config.learner.ranks
    return rank.peak * sharing <= machines.device_bytes


def _wanted(config: Config, rank: RankMemory, machines: Machines) -> float:
    """GiB that one GPU, or the host, would have to have."""
    return rank.peak * (1 if machines.has_gpus else config.learner.ranks) / GIB / (1.0 - machines.headroom)


def _neighbours(config: Config, shape: ModelShape, machines: Machines) -> Iterator[dict[str, Any]]:
    """Changes of the learner: the fewest keys first, of as many those further up here, and small ones."""
    keys: dict[str, list[Any]] = {
        "learner.tokens_per_micro_batch": _shorter_rows(config, shape, machines),
        "learner.recompute": ["selective", "full"],
        "learner.layout.tensor": _larger(config, "learner.layout.tensor", machines.gpus_per_host),
        "learner.layout.expert": _larger(config, "learner.layout.expert", shape.moe.experts) if shape.moe else [],
        "learner.layout.pipeline": _larger(config, "learner.layout.pipeline", shape.layers),
        "learner.layout.context": _larger(config, "learner.layout.context", machines.gpus_per_host),
        "learner.ranks": _larger(config, "learner.ranks", 1 << 20),
        "learner.optimizer.offload": [1.0] if machines.has_gpus else [],
    }
    options = []
    for cost, (key, values) in enumerate(keys.items(), 1):
        now = value_at(config, key)
        others = [(cost, place, key, value) for place, value in enumerate(values, 1) if value != now]
        options.append([(0, 0, key, now), *others])
    for chosen in sorted(itertools.product(*options), key=_size):
        changes = {key: value for _, place, key, value in chosen if place}
        if 0 < len(changes) <= MOST_CHANGES:
            yield changes


def _size(chosen: Sequence[tuple[int, int, str, Any]]) -> tuple[int, int, int]:
    """How much is changed: keys, which ones, how far."""
    return sum(each[1] > 0 for each in chosen), sum(each[0] for each in chosen), sum(each[1] for each in chosen)


def _larger(config: Config, key: str, most: int) -> list[int]:
    now = value_at(config, key)
    return [now * times for times in LARGER[1:] if now * times <= most]


def _shorter_rows(config: Config, shape: ModelShape, machines: Machines) -> list[int]:
    """Half the budget, a quarter, ..., as long as the longest sequence has room."""
    now = config.learner.tokens_per_micro_batch
    longest = max(longest_sequence(pool, shape, machines) for pool in config.generate.each_pool)
    return [now // times for times in LARGER[1:] if now // times >= longest]


def _with(config: Config, changes: dict[str, Any]) -> Config | None:
    """The configuration with these keys; None where they do not go together."""
    tree = as_tree(config)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = tree
        for name in parents:
            section = section[name]
        section[last] = value
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None
