"""What needs an answer stays until it has one."""

from __future__ import annotations

from streamrl.stream.session import Outbox


def drain(outbox: Outbox[int, str]) -> list[int]:
    sent = []
    while (unsent := outbox.unsent()) is not None:
        outbox.sent(unsent[0])
        sent.append(unsent[0])
    return sent


def test_words_are_sent_in_the_order_in_which_they_came_and_once() -> None:
    outbox: Outbox[int, str] = Outbox()
    for key in (3, 1, 2):
        outbox.put(key, "word")
    assert drain(outbox) == [3, 1, 2]
    assert drain(outbox) == []
    assert outbox.keys == (3, 1, 2)


def test_what_has_no_answer_is_sent_again() -> None:
    outbox: Outbox[int, str] = Outbox()
    for key in range(3):
        outbox.put(key, "word")
    drain(outbox)
    assert outbox.answered(1)
    outbox.again()
    assert drain(outbox) == [0, 2]


def test_an_answer_counts_for_its_key_alone() -> None:
    outbox: Outbox[tuple[int, int], str] = Outbox()
    outbox.put((1, 1), "second attempt")
    assert not outbox.answered((1, 0))
    assert (1, 1) in outbox
    assert outbox.answered((1, 1))
    assert len(outbox) == 0
    assert outbox.unsent() is None
