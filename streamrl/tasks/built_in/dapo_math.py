"""The task `dapo_math`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamrl.tasks.questions import Questions


class DapoMath(Questions):
    """DAPO-Math-17k: 16893 prompts to train, 1024 held out.

    The questions say "Answer:" themselves, and each is there 100 times.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
        "distinct": True,
        "held_out_count": 1024,
        "form": "line",
        "reward_wrong": -1.0,
        "reward_unparsed": -1.0,
    }
