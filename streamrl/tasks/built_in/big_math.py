"""The task `big_math`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class BigMath(Questions):
    """Big-Math-RL-Verified."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "SynthLabsAI/Big-Math-RL-Verified",
        "prompt": "problem",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    }
