"""The task `openmath`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class OpenMath(Questions):
    """OpenMathInstruct-2, which has several solutions to each problem."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "distinct": True,
        "prompt": "problem",
        "answer": "expected_answer",
        "suffix": BOXED,
        "form": "boxed",
    }
