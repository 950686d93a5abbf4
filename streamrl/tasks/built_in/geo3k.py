"""The task `geo3k`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import BOXED, Questions


class Geo3k(Questions):
    """Geometry3K, for vision-language models: 2101 rows to train, 601 held out."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "hiyouga/geometry3k",
        "test_split": "test",
        "prompt": "problem",
        "images": "images",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    }
