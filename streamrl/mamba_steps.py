"""Steps of Mamba-2 in transformers' models as SGLang and the learner have them: above 0, without a floor.

transformers 5 takes the smallest step that a model was initialised with (`time_step_min`) for the smallest one that it
may ever make.
"""

from __future__ import annotations

import math
from typing import Any


def without_floor(model: Any) -> Any:
    """The model of transformers, changed; one without Mamba-2 layers is as it was."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return model
