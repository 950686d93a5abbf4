"""What a worker and a reward model say to each other: one call for the answers of a group, in JSON."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from streamrl.whole_files import write_whole

PATH = "/score"
LARGEST = 64 << 20  # bytes of a call
LARGEST_REPLY = 4 << 20  # bytes of a reply: a number or a line for each answer
LONGEST_REASON = 300  # characters


class BadReply(ValueError):
    """A reply that is none: the text says why in one line."""


class Turn(msgspec.Struct, frozen=True):
    """One message of the prompt."""

    role: str
    content: str


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, as text or as messages, and the answers to it."""

    answers: list[str]
    text: str | None = None
    messages: list[Turn] | None = None


class Score(msgspec.Struct, frozen=True, omit_defaults=True):
    """The score of one answer: a number, or why there is none."""

    score: float | None = None
    error: str = ""


class Scores(msgspec.Struct, frozen=True):
    """The scores of all answers of a call, in their order."""

    scores: list[Score]


def scores_of(body: bytes, count: int) -> list[float | str]:
    """For each of `count` answers its score, finite, or why it has none. Raises BadReply for anything else."""
    try:
        found = msgspec.json.decode(body, type=Scores).scores
    except msgspec.MsgspecError as error:
        raise BadReply(f"a reply that is none: {str(error)[:LONGEST_REASON]}") from None
    if len(found) != count:
        raise BadReply(f"{len(found)} scores for {count} answers")
    for each in found:
        if (each.score is None) == (not each.error) or (each.score is not None and not math.isfinite(each.score)):
            raise BadReply("an answer without a finite score and without a reason")
    return [each.error[:LONGEST_REASON] if each.score is None else each.score for each in found]


def address_path(run_folder: Path, index: int) -> Path:
    return run_folder / f"reward-model-{index}.address"


def write_address(run_folder: Path, index: int, address: str) -> None:
    write_whole(address_path(run_folder, index), address + "\n")


def read_address(run_folder: Path, index: int) -> str | None:
    """None while it does not listen."""
    try:
        return address_path(run_folder, index).read_text().strip() or None
    except FileNotFoundError:
        return None
