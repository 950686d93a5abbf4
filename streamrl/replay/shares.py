"""Which task a group belongs to: its place in a block of groups_per_step ids decides, so that shares are exact.

Every block of P consecutive ids has each task's quota (Megatron-RL's rules: largest remainder over the weights,
at least one group for every task with a weight, none without), spread evenly over the block.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.config import Config


class Shares:
    """The tasks of a run and their places in a block.

    >>> shares = Shares({"math": 3, "code": 1}, groups_per_step=8)
    >>> shares.quotas, [shares.task(group_id) for group_id in range(8)].index("code")
    ({'math': 6, 'code': 2}, 2)
    """

    def __init__(self, weights: Mapping[str, float], groups_per_step: int) -> None:
        """Raises ValueError unless the tasks with a weight are 1 to `groups_per_step`."""
        self.quotas = _quotas({task: weight for task, weight in weights.items() if weight > 0}, groups_per_step)
        self._block = _spread(self.quotas)

    @property
    def groups_per_step(self) -> int:
        return len(self._block)

    def task(self, group_id: int) -> str:
        """The task of this place."""
        return self._block[group_id % len(self._block)]


def make_shares(config: Config) -> Shares:
    """The shares of `task.mix`, or the one task of a run without a mix."""
    return Shares({share.key: share.weight for share in config.task.shares}, config.replay.groups_per_step)


def _quotas(weights: Mapping[str, float], groups: int) -> dict[str, int]:
    """Whole numbers in proportion to the weights, which are all above 0, with the sum `groups`."""
    if not 1 <= len(weights) <= groups:
        raise ValueError(f"{len(weights)} tasks with a weight share {groups} groups: at least one group each is needed")
    total = sum(weights.values())
    exact = {task: groups * weight / total for task, weight in weights.items()}
    quotas = {task: int(share) for task, share in exact.items()}
    by_remainder = sorted(exact, key=lambda task: quotas[task] - exact[task])  # stable: ties in the order of the mix
    for task in by_remainder[: groups - sum(quotas.values())]:
        quotas[task] += 1
    for task in [task for task, quota in quotas.items() if quota == 0]:
        richest = max((other for other in quotas if quotas[other] > 1), key=lambda other: quotas[other] - exact[other])
        quotas[task], quotas[richest] = 1, quotas[richest] - 1
    return quotas


def _spread(quotas: Mapping[str, int]) -> tuple[str, ...]:
    """Each task's places at the middles of as many equal parts of the block."""
    places = [((place + 0.5) / quota, task) for task, quota in quotas.items() for place in range(quota)]
    return tuple(task for _, task in sorted(places, key=lambda place: place[0]))
