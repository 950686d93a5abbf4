"""What weights of a step contain, from the lives of the groups: for the learner's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.replay.lives import Lives
from streamrl.types import Ledger


def ledger_of(lives: Lives, step: int, next_id: int, cursors: Mapping[str, int], history: int | None) -> Ledger:
    """Every group that the steps before `step` consumed, and no other; `history`: digest of those steps."""
    open_lives = [life for life in lives.values() if life.first is None or life.first >= step]
    below = min((life.group_id for life in open_lives), default=next_id)
    pending = {life.group_id: (life.task, life.prompt_index) for life in open_lives}
    return Ledger(
        below=below,
        above=tuple(group_id for group_id in range(below, next_id) if group_id not in pending),
        pending=dict(sorted(pending.items())),
        cursors=dict(cursors),
        history=history,
        quarantined={
            life.group_id: life.attempt
            for life in lives.values()
            if life.quarantined and any(life.empty_at(use) for use in life.uses if use < step)
        },
    )
