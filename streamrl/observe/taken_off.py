"""What `algo.kl_reward` took off the reward of each trained sample, as the learner's events have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from streamrl.observe.events import role_events

TAKEN_OFF = "learner.taken_off"

# (learner step, group id): of each sample of the group, in its order
TakenOff = Mapping[tuple[int, int], list[float]]


def taken_off(run_folder: Path) -> TakenOff:
    """What each trained group lost; empty where the reward is trained as it is.

    Of a step that was trained again, the last time counts.

    Example: `{(3, 17): [0.02, 0.0]}`: step 3 trained group 17, whose first sample lost 0.02.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for record in role_events(run_folder, "learner"):
        if record["event"] == TAKEN_OFF:
            found |= {(record["step"], group): values for group, values in record["groups"]}
    return found
