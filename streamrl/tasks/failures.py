"""What a scorer that fails says of its answer, and where in the user's code it failed.

    it raises on the answer                            ─▶ the task's lowest reward, trained and counted
    it has no time, no process or no service left      ─▶ the sample is masked, and counted
    it raises on every answer of a group               ─▶ the group is masked, and counted

Masking an answer that its scorer cannot bear would pay the policy for it; a low reward for an answer that nobody has
judged would teach chance. So a task says which of its exceptions are of which kind: `Environment.infrastructure`.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

MOST_CHARACTERS = 300  # of a failure's text


class ScorerLate(TimeoutError):
    """User code that ran over its deadline: its process was ended."""


class ScorerLost(ConnectionError):
    """The process that ran user code has ended: by itself, by a signal, or for want of memory."""


class ScorerUnready(RuntimeError):
    """No process could be made ready to run user code."""


class ScorerRaised(RuntimeError):
    """What user code raised in another process. Its text is that exception and its place."""

    def __init__(self, text: str, *, masked: bool) -> None:
        """`masked`: it says nothing of the answer."""
        super().__init__(text)
        self.masked = masked


# What says nothing of an answer, unless a task says otherwise; ScorerLate and ScorerLost are among them.
INFRASTRUCTURE: tuple[type[Exception], ...] = (TimeoutError, ConnectionError, ScorerUnready)


def describe(error: BaseException) -> str:
    """The exception, its text and its place in the user's code, on one line.

    >>> describe(KeyError("answer"))  # with its place, ` (rewards.py:12)`, where a user's function raised it
    "KeyError: 'answer'"
    """
    if isinstance(error, ScorerRaised):
        return str(error)
    place = _place(error)
    text = " ".join(f"{type(error).__name__}: {text_of(error)}".split()).rstrip(": ")
    return f"{text[:MOST_CHARACTERS]} ({place})" if place else text[:MOST_CHARACTERS]


def text_of(error: BaseException) -> str:
    """`str(error)`, cut, and readable by whatever it is sent to; the user's own class may not even have a text."""
    try:
        text = str(error)[: 10 * MOST_CHARACTERS]
    except BaseException as raised:
        text = f"its text cannot be made ({type(raised).__name__})"
    return text.encode(errors="replace").decode()


def exceptions_of(named: Any, whose: str) -> tuple[type[Exception], ...]:
    """What `infrastructure` names: a class of exceptions, or several. Raises ValueError for anything else."""
    kinds = tuple(named) if isinstance(named, list | tuple | set | frozenset) else (named,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ValueError(
                f"{whose}.infrastructure: {kind!r} is no class of exceptions; allowed: a tuple of such classes"
            )
    return kinds


def is_masked(error: BaseException, infrastructure: tuple[type[Exception], ...]) -> bool:
    """Whether a failure says nothing of the answer, where these classes of exceptions do not."""
    if isinstance(error, ScorerRaised):
        return error.masked
    return isinstance(error, exceptions_of(infrastructure, "task"))  # a class that runs inline is nowhere else checked


def _place(error: BaseException) -> str | None:
    """FILE:LINE of the innermost frame that is neither of streamrl nor of a library; None where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (place := _of_the_user(Path(frame.filename), frame.lineno or 0)) is not None:
            return place
    return None


def place_in(dump: str) -> str | None:
    """The place in the user's code of a stack that `faulthandler` wrote, innermost frame first; None without one."""
    for file, line in re.findall(r'^  File "(.+)", line (\d+) in ', dump, re.MULTILINE):
        if (place := _of_the_user(Path(file), int(line))) is not None:
            return place
    return None


def _of_the_user(path: Path, line: int) -> str | None:
    """FILE:LINE, from here where the file lies below; None for a file that is not the user's."""
    if not path.is_file() or path.is_relative_to(_PACKAGE) or _is_library(path):
        return None
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return f"{path}:{line}"
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def _is_library(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _LIBRARIES)
