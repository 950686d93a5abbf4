"""How much is in flight at once: requests and tickets of a worker, and what Megatron-RL's generation lag is of them.

    lag L  ─▶  max(1, round((L + 1) P)) groups, or with `generate.submission: sample` as many times G requests, over all
               workers: evenly, the first ones have one more

P = replay.groups_per_step, G = generate.group_size. A lag between -1 and 0 is fewer groups than a step needs: a group
that is done makes room for the next one, so that the step still comes. It bounds no age: `replay.max_staleness` does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.config.generate import GenerateConfig
    from streamrl.config.tree import Config

# Groups that a worker has ahead of its requests in flight, so that a free place waits for no ticket.
AHEAD = 1


def of_lag(config: Config) -> int:
    """Groups, or requests, that `generate.lag` lets be in flight at once, over all workers."""
    assert config.generate.lag is not None
    samples = config.generate.group_size if config.generate.by_sample else 1
    return max(1, round((config.generate.lag + 1) * config.replay.groups_per_step * samples))


def without_lag(config: Config, pool: GenerateConfig, index: int = 0) -> GenerateConfig:
    """The pool's settings with worker `index`'s part of the lag in its place; as they are where there is none.

    Worker 0 has the largest part, and one beyond the configured ones the smallest.
    """
    if pool.lag is None:
        return pool
    part, left = divmod(of_lag(config), config.workers)
    key = "requests_in_flight" if pool.by_sample else "groups_in_flight"
    return pool.model_copy(update={"lag": None, key: part + (index < left)})


def most_requests(config: Config, pool: GenerateConfig) -> int:
    """Requests for one sample that a worker of the pool has in flight at the most.

    Of `auto` these are what the slots of the staleness bound have; the KV cache allows fewer.
    """
    own = without_lag(config, pool)
    if own.requests_in_flight == "auto":
        return config.replay.slots * own.group_size
    return own.requests_in_flight or own.groups_in_flight * own.group_size


def tickets(requests: int) -> int:
    """Tickets that a worker holds at the most by sample: each place may have the last sample of another group.

    >>> tickets(64)
    65
    """
    return requests + AHEAD


def wanted(places: int, group_size: int, groups: int, asked: int) -> int:
    """Tickets to hold at the most: `groups` are open and have `asked` requests that run or wait.

    At least one: a worker that wants none is about to end (replay/generator_side.py).

    >>> [wanted(64, 8, groups, asked) for groups, asked in ((0, 0), (9, 72), (9, 64), (30, 60))]
    [9, 9, 10, 32]
    """
    short = places + AHEAD * group_size - asked
    return max(1, min(tickets(places), groups + max(0, math.ceil(short / group_size))))
