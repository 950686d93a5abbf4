"""What was finished stays until it is answered for."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.generate.outbox import Outbox
from streamrl.types import Group


def drain(outbox: Outbox) -> list[int]:
    sent = []
    while (group := outbox.unsent()) is not None:
        outbox.sent(group)
        sent.append(group.group_id)
    return sent


def test_groups_are_sent_in_the_order_in_which_they_were_finished_and_once(make_group: Callable[..., Group]) -> None:
    outbox = Outbox()
    for group_id in (3, 1, 2):
        outbox.put(make_group(group_id))
    assert drain(outbox) == [3, 1, 2]
    assert drain(outbox) == []
    assert outbox.keys == ((3, 0), (1, 0), (2, 0))


def test_what_has_no_answer_is_sent_again(make_group: Callable[..., Group]) -> None:
    outbox = Outbox()
    for group_id in range(3):
        outbox.put(make_group(group_id))
    drain(outbox)
    assert outbox.answered((1, 0))
    outbox.again()
    assert drain(outbox) == [0, 2]


def test_an_answer_counts_for_its_attempt_alone(make_group: Callable[..., Group]) -> None:
    outbox = Outbox()
    outbox.put(make_group(1, attempt=1))
    assert not outbox.answered((1, 0))
    assert (1, 1) in outbox
    assert outbox.answered((1, 1))
    assert len(outbox) == 0
    assert outbox.unsent() is None
