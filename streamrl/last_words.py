"""The one line in which a role says why it ends, and how the process that started it finds this line in its log.

Ranks of the learner are started by torchrun, which replaces their exit codes by 1 and writes a frame of its own below
what they said. The line therefore tells by how it begins what the exit code would be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REFUSAL = "streamrl: "  # exit code 2: the configuration
FAILURE = "streamrl failed: "  # exit code 1


@dataclass(frozen=True, slots=True)
class LastWord:
    """Why a role ended, and with which exit code."""

    reason: str
    code: int


def failure(reason: str) -> str:
    """The line of a role that fails; of one that refuses its configuration it is REFUSAL and the reason.

    >>> failure("no room")
    'streamrl failed: no room'
    """
    return FAILURE + " ".join(reason.splitlines())


def first_of(lines: Iterable[str]) -> LastWord | None:
    """What the first of the ranks said that ended: the others fail for want of it. None where nobody said a word."""
    for line in map(str.strip, lines):
        for beginning, code in ((REFUSAL, 2), (FAILURE, 1)):
            if line.startswith(beginning):
                return LastWord(line.removeprefix(beginning), code)
    return None
