"""Which branch of a session a call goes on with. Pure.

branches   [a, b]   [a, b, c, d]   [x, y]
call       [a, b, c, d, e]                 -> the second: of the histories that the call begins with the longest
call       [a, b]                          -> none: it adds nothing; it begins a branch of its own
call       [a, c, d]                       -> none: it was rewritten
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def extended(histories: Sequence[Sequence[Any] | None], call: Sequence[Any]) -> int | None:
    """The branch whose history the call begins with, and goes beyond; None where there is none.

    histories: of each branch its messages as a tuple, or its text; None of one that cannot be continued now. call: of
    the same type. Of several the longest is taken, of equally long ones the first.

    >>> extended(["q: a", "q: a b", None], "q: a b c")
    1
    """
    lengths = [len(history) if history is not None and _begins(history, call) else -1 for history in histories]
    longest = max(lengths, default=-1)
    return lengths.index(longest) if longest >= 0 else None


def _begins(history: Sequence[Any], call: Sequence[Any]) -> bool:
    return len(call) > len(history) and call[: len(history)] == history
