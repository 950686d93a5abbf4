"""Every order passes what a user's own must pass; and one that breaks a promise does not."""

from __future__ import annotations

from typing import ClassVar

import pytest

from streamrl.choices import ORDERS
from streamrl.replay.orders.fifo import Fifo
from streamrl.replay.orders.ready import Ready
from streamrl.testing.orders import OrderConformance

TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once
SETTINGS = {"windowed": {"window": 3}}

for _name in ORDERS.names:
    _class = f"Test{_name.capitalize()}"
    globals()[_class] = type(
        _class, (OrderConformance,), {"name": _name, "settings": SETTINGS.get(_name, {}), **TOGETHER}
    )


class TestReadyThatPassesOverAgeGroups(OrderConformance):
    name = "ready"
    settings: ClassVar = {"over_age": "pass"}


class Forgetful(Fifo):
    """Consumes one group less, trains it twice, and so on: what each test is for."""

    def select(self, step, completed, below, above):
        ids = super().select(step, completed, below, above)
        return ids and (*ids[:-1], ids[0])


class TooOld(Ready):
    """Tells a bound that it does not keep."""

    def over_age(self, step, oldest):
        return False

    def required_step(self, group_id, step=0, slots=None):
        return 0 if group_id < 64 else super().required_step(group_id, step, slots)


class OutOfOrder(Ready):
    """Says that it goes by ids."""

    def allows(self, group_id, oldest):
        return group_id == oldest


class Remembers(Fifo):
    """Gives no step when it is asked first."""

    asked = 0

    def select(self, step, completed, below, above):
        self.asked += 1
        return None if self.asked == 1 else super().select(step, completed, below, above)


class Waits(Fifo):
    """Waits for a group that is not issued before the step is made."""

    def select(self, step, completed, below, above):
        return super().select(step, completed, below, above) if below + self.capacity in completed else None


@pytest.mark.parametrize(
    ("order", "test"),
    [
        (Forgetful, "test_no_step_lacks_a_group_and_none_is_taken_twice"),
        (TooOld, "test_no_token_is_older_than_the_bound"),
        (OutOfOrder, "test_what_it_consumes_is_what_the_audit_allows"),
        (Remembers, "test_it_keeps_no_state"),
        (Waits, "test_no_step_lacks_a_group_and_none_is_taken_twice"),
    ],
)
def test_an_order_that_breaks_a_promise_is_found_out(order, test):
    kit = OrderConformance()
    kit.name = f"{__name__}:{order.__name__}"
    with pytest.raises(AssertionError):
        getattr(kit, test)()
