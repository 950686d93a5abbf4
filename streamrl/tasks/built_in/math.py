"""The task `math`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class Math(Questions):
    """MATH: 7500 rows to train, 5000 held out."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "DigitalLearningGmbH/MATH-lighteval",
        "test_split": "test",
        "prompt": "problem",
        "answer": "solution",
        "answer_boxed": True,
        "suffix": BOXED,
        "form": "boxed",
    }
