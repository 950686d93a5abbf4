"""Where the answer is in a model's text: between tags, in a box, on a line of its own, or the whole of it.

Pure text: every function takes time in proportion to the text, whatever the text is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Form = Literal["whole", "tagged", "boxed", "line"]

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_MARK = re.compile("answer:", re.IGNORECASE | re.ASCII)

# What may follow an answer and is no further text: the end of a formula and of a sentence.
_ENDINGS = " \t\r\n$.)]}\\"

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Found:
    """An answer that was found, and whether the text goes on behind it."""

    answer: str
    trailing: bool


def find_answer(text: str, form: Form) -> Found | None:
    """The last answer of `text` in one form, or None where there is none.

    whole   the text itself
    tagged  <answer>12</answer>; a box inside is opened
    boxed   \\boxed{12}, with braces that match
    line    what follows "Answer:" up to the end of the line, as DAPO's prompts ask for it

    >>> find_answer("So it is \\\\boxed{12}.", "boxed")
    Found(answer='12', trailing=False)
    """
    found: Found | None
    match form:
        case "whole":
            found = Found(text.strip(), trailing=False)
        case "tagged":
            found = _tagged(text)
        case "boxed":
            found = _boxed(text)
        case "line":
            found = _line(text)
    return found if found is not None and found.answer else None


def boxed(text: str) -> str | None:
    """The content of the last box, or None."""
    found = _boxed(text)
    return None if found is None else found.answer


def last_between(text: str) -> Found | None:
    """What the last pair of <answer> tags has between them, as it is; anything but space behind it is trailing.

    >>> last_between("<answer> 3 </answer> so <answer>4</answer>.")
    Found(answer='4', trailing=True)
    """
    found, place = None, 0
    while (start := text.find(_OPEN, place)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        place = end + len(_CLOSE)
        found = text[start + len(_OPEN) : end].strip()
    return None if found is None else Found(found, bool(text[place:].strip()))


def outermost_box(text: str) -> Found | None:
    r"""What the last box has in it that is in no other one; anything but space behind it is trailing.

    >>> outermost_box("\\boxed{1} or \\boxed{\\frac{1}{2}}")
    Found(answer='\\frac{1}{2}', trailing=False)
    """
    opened: list[int] = []  # where the content of each open brace begins; below 0 for one that is no box's
    found: tuple[int, int] | None = None
    for place, character in enumerate(text):
        if character == "{":
            opened.append(place + 1 if text.endswith(_BOX, 0, place + 1) else -1)
        elif character == "}" and opened and (start := opened.pop()) >= 0:
            found = start, place
    return None if found is None else Found(text[found[0] : found[1]].strip(), bool(text[found[1] + 1 :].strip()))


def last_number(text: str) -> str:
    """The last number of `text`, thousands without their commas; empty where there is none.

    >>> last_number("4 + 3 = 7.")
    '7'
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""


def _tagged(text: str) -> Found | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    inside = text[start + len(_OPEN) : end].strip()
    return Found(boxed(inside) or inside, _goes_on(text[end + len(_CLOSE) :]))


def _boxed(text: str) -> Found | None:
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth, escaped = 1, False
    for place, character in enumerate(text[start:], start):
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return Found(text[start:place].strip(), _goes_on(text[place + 1 :]))
        escaped = character == "\\" and not escaped
    return None


def _line(text: str) -> Found | None:
    *_, last = (None, *_MARK.finditer(text))
    if last is None:
        return None
    answer, _, rest = text[last.end() :].partition("\n")
    answer = answer.strip().strip("*").strip()
    return Found(boxed(answer) or answer, _goes_on(rest))


def _goes_on(rest: str) -> bool:
    return bool(rest.strip(_ENDINGS))
