"""The task `countdown`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import Questions

QUESTION = (
    "Using the numbers {nums}, write an expression that equals {target}. Use + - * / and parentheses, and each number "
    "exactly once. Give the expression alone within <answer> and </answer>, such as <answer>(1 + 2) / 3</answer>."
)


class Countdown(Questions):
    """Countdown: an expression of given numbers that equals a given number."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "Jiayi-Pan/Countdown-Tasks-3to4",
        "template": QUESTION,
        "answer": "target",
        "numbers": "nums",
        "judge": "countdown",
        "form": "tagged",
        "distinct": True,
        "reward_wrong": 0.1,
    }
