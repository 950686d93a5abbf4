"""Why a group is not taken."""

from __future__ import annotations

from streamrl.replay.life import ISSUED
from streamrl.replay.lives import Life


class GroupRefused(Exception):
    """The group cannot be taken; the message says why."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        """`is_late`: the ticket is another's by now, or nobody's."""
        super().__init__(reason)
        self.is_late = is_late


class DuplicateGroup(GroupRefused):
    """This very attempt was accepted before: its worker may forget it."""


def refusal(group_id: int, attempt: int, life: Life | None, next_id: int) -> GroupRefused:
    """Why an answer is for no ticket of its worker. `life`: what is known of the group; `next_id`: not yet issued."""
    what = f"group {group_id} attempt {attempt}"
    if life is None:
        return GroupRefused(f"{what} is trained already" if group_id < next_id else f"{what}: no ticket")
    if life.completed is not None and life.completed.attempt == attempt:
        return DuplicateGroup(f"{what} is {life.phase} already")
    if life.phase is ISSUED and life.attempt == attempt:
        return GroupRefused(f"{what} is the ticket of worker {life.holder}", is_late=True)
    is_lost = life.recorded is ISSUED and life.phase is not ISSUED
    return GroupRefused(f"{what}: attempt {life.attempt} is {'lost' if is_lost else life.phase}", is_late=True)
