"""The task `gsm8k`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class Gsm8k(Questions):
    """GSM8K: 7473 rows to train, 1319 held out."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "openai/gsm8k",
        "subset": "main",
        "test_split": "test",
        "prompt": "question",
        "answer": "answer",
        "answer_after": "####",
        "suffix": BOXED,
        "form": "boxed",
    }
