"""What `replay.reuse`, the number of times that a group may be trained, needs of the other keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from streamrl.choices import ORDERS

if TYPE_CHECKING:
    from streamrl.config.replay import ReplayConfig
    from streamrl.config.tree import Config

# So that 0.3 of 10 groups is 3 of them, however a product is rounded.
ROUNDING = 1e-9


def most(replay: ReplayConfig) -> int:
    """R, groups of a step that may have been trained before."""
    return int(replay.reuse_share * replay.groups_per_step + ROUNDING) if replay.reuse > 1 else 0


def check(replay: ReplayConfig) -> None:
    """Raise ValueError where groups cannot be trained again as these keys say."""
    if replay.reuse == 1:
        return
    name, groups = f"reuse: {replay.reuse}", replay.groups_per_step
    if not replay.chosen("order").leaves_places():
        able = " or ".join(order for order in ORDERS.names if ORDERS.load(order).leaves_places())
        raise ValueError(f"{name} is not possible with order={replay.order}; allowed: 1, or an order of {able}")
    if replay.bound == 0:
        raise ValueError(f"{name} trains old tokens, max_staleness=0 has none; allowed: 1, or max_staleness above 0")
    if most(replay) == 0:
        raise ValueError(
            f"reuse_share: {replay.reuse_share:g} of {groups} groups is none; allowed: {1 / groups:g} or more"
        )
    if (slots := math.floor((replay.bound + 1) * replay.fresh + ROUNDING)) < groups:
        # Where nothing can be trained again, a step needs as many fresh groups as it has.
        fitting = math.floor(groups - groups / (replay.bound + 1) + ROUNDING)
        allowed = f"up to {fitting / groups:g}" if fitting else "reuse=1"
        raise ValueError(
            f"reuse_share: {replay.reuse_share:g} leaves {slots} slots at max_staleness={replay.max_staleness:g}, "
            f"fewer than the {groups} groups of a step without reuse; allowed: {allowed}, or a larger max_staleness"
        )


def check_run(config: Config) -> None:
    """Raise ValueError where what else is configured does not go with it."""
    name = f"replay.reuse: {config.replay.reuse}"
    if config.replay.reuse == 1:
        return
    if config.journal.keep == "none":
        raise ValueError(f"{name} needs the groups that a journal keeps, and journal.keep=none; allowed: 1")
    if config.learner.passes > 1:
        raise ValueError(
            f"{name} goes by the effective sample size that a step measures in its first pass, and learner.passes="
            f"{config.learner.passes} has others after it; allowed: 1, or learner.passes=1"
        )
    if config.run.epochs is not None:
        raise ValueError(
            f"{name} leaves open how many steps run.epochs={config.run.epochs:g} has; allowed: 1, or run.steps"
        )
