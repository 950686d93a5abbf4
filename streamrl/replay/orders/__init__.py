"""The orders in which groups can be consumed: `replay.order`. `base.py` says what one is, and has the bound."""

from __future__ import annotations

from streamrl.config.replay import ReplayConfig
from streamrl.replay.orders.base import Order


def make_order(config: ReplayConfig, publish_every: int = 1) -> Order:
    """The order that `replay.order` names. Raises ValueError where a publish every k steps would deadlock."""
    groups, slots = config.groups_per_step, config.slots
    if slots < publish_every * groups:
        raise ValueError(
            f"{slots} slots would deadlock: {publish_every * groups} groups train before a publish; "
            "raise replay.max_staleness, or lower publish.every, replay.window or replay.reuse_share"
        )
    declaration: type[Order] = config.chosen("order")
    order = declaration.of(config)
    order.fresh = config.fresh
    order.options = declaration.Options.model_validate(config.order_options)
    return order
