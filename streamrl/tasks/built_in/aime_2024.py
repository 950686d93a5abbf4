"""The task `aime_2024`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class Aime2024(Questions):
    """AIME 2024, for evaluation."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "HuggingFaceH4/aime_2024",
        "evaluation_only": True,
        "prompt": "problem",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    }
