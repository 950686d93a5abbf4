"""Which answers of a batch are shown as text, and what a row of such a table says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from streamrl.types import Batch, Group, Sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GROUPS = 8
"""Of a batch, evenly spaced, each with its best and its worst answer: what a person reads at one sitting."""

LONGEST = 4000
"""Characters of a prompt or an answer: of a long one its beginning and its end are shown."""

COLUMNS = ("task", "group", "prompt", "answer", "reward", "parts", "finish", "tokens")


class Answers:
    """Reads token ids by the model's tokenizer, which is loaded when the first batch is shown."""

    def __init__(self, model: Path) -> None:
        """`model`: its folder. Without `tokenizer.json` in it, texts are token ids."""
        self._file = model / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def rows(self, batch: Batch) -> list[tuple[str, int, str, str, float, str, str, int]]:
        """One row of COLUMNS for each answer that is shown; none where every sample failed."""
        if self._tokenizer is None and self._file.exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return [self._row(group, sample) for group in _spread(batch) for sample in _ends(group)]

    def _row(self, group: Group, sample: Sample) -> tuple[str, int, str, str, float, str, str, int]:
        parts = json.dumps({name: round(value, 6) for name, value in sample.reward_parts.items()}, ensure_ascii=False)
        prompt, answer = self._text(sample.prompt_ids), self._text(sample.output_ids)
        length = len(sample.output_ids)
        return (group.task, group.group_id, prompt, answer, sample.reward, parts, sample.finish_reason, length)

    def _text(self, ids: np.ndarray) -> str:
        tokens = ids.tolist()
        if self._tokenizer is None:
            return shortened(" ".join(map(str, tokens)))
        return shortened(self._tokenizer.decode(tokens, skip_special_tokens=False))


def shortened(text: str) -> str:
    """Its beginning and its end, LONGEST characters together.

    >>> shortened("abc")
    'abc'
    """
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters) … {text[-half:]}"


def _spread(batch: Batch) -> Sequence[Group]:
    groups = [group for group in batch.groups if group.answered]
    places = np.linspace(0, len(groups) - 1, min(GROUPS, len(groups))).round().astype(int)
    return [groups[place] for place in places]


def _ends(group: Group) -> Sequence[Sample]:
    """The best answer and the worst; the one that there is."""
    ordered = sorted(group.answered, key=lambda sample: -sample.reward)
    return ordered[:1] if len(ordered) == 1 else (ordered[0], ordered[-1])
