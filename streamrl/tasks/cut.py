"""Prompts that are too long, cut to their limit (`task.long_prompts`): which of their token ids stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# int32 [P] and how many of them stay -> those.
_SIDES: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "cut_left": lambda ids, limit: ids[len(ids) - limit :],
    "cut_right": lambda ids, limit: ids[:limit],
    "cut_middle": lambda ids, limit: np.concatenate([ids[: limit // 2], ids[len(ids) - (limit - limit // 2) :]]),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a task's prompts are cut, the same for every process and every resume of a run."""

    side: str  # what is cut off, as `task.long_prompts` has it
    limit: int  # tokens that stay, >= 1

    def kept(self, ids: np.ndarray) -> np.ndarray:
        """int32 [P] with P <= limit: what stays of a prompt, special tokens of a chat template being tokens as any.

        >>> Cut("cut_middle", 3).kept(np.arange(5)).tolist()
        [0, 3, 4]
        """
        return ids if len(ids) <= self.limit else _SIDES[self.side](ids, self.limit)
