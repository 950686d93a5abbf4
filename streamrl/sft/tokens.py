"""One row of a data set as tokens, and which of them are trained: as a generator would have made them.

    prompt ──chat template──▶ ids │ answer ──▶ ids, end │              trained: answer and end, of each turn
    conversation: ... up to the first answer │ answer, end │ what the template writes up to the next one │ answer, end

The policy meets the same tokens in a run of `train`: prompts by the template, answers tokenised on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.config.sft import SftConfig
from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.environment import Message, message_text
from streamrl.tasks.rows import text_of, value_at

KEY = "sft.data"
ASSISTANT = "assistant"


@dataclass(slots=True)
class _Growing:
    """A row while it is put together."""

    ids: list[np.ndarray] = field(default_factory=list)
    trained: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: np.ndarray, *, trained: bool) -> None:
        self.ids.append(ids)
        self.trained.append(np.full(len(ids), trained))


class RowTokens:
    """Makes tokens of the rows of one data set.

    Example: `RowTokens(tokenizer, config.sft).of({"prompt": "ab=", "answer": "ab"})`, with `chat: false`, is the ids of
    `a b = a b END` and the mask 000111.
    """

    def __init__(self, tokenizer: Tokenizer, settings: SftConfig) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._end_of_turn: int | None = None  # once a turn was ended

    def of(self, row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [L], trained bool [L]). Raises ValueError, with the reason, for a row that cannot be trained."""
        column = self._settings.data.messages
        made = self._answered(row) if column is None else self._conversation(row, column)
        ids, trained = np.concatenate(made.ids), np.concatenate(made.trained)
        if not len(made.ids[0]):
            raise ValueError("the tokenizer makes no token of its prompt, and nothing would predict the first one")
        if self._settings.train_on == "all":
            trained = np.arange(len(ids)) > 0
        return ids, trained

    def _answered(self, row: dict[str, Any]) -> _Growing:
        """A prompt and its answer."""
        data, made = self._settings.data, _Growing()
        prompt, answer = value_at(row, data.prompt), value_at(row, data.answer)
        if not isinstance(answer, str | int | float):
            raise ValueError(f"{data.answer!r} is no text")
        if data.chat:
            turns = self._asked(prompt)
            made.add(self._tokenizer.prompt_ids(turns), trained=False)
            made.add(self._ended(text_of(answer), self._end(turns)), trained=True)
        elif isinstance(prompt, str):
            made.add(self._tokenizer.prompt_ids(prompt + data.suffix), trained=False)
            made.add(self._ended(text_of(answer), self._tokenizer.end_id), trained=True)
        else:
            raise ValueError(f"{data.prompt!r} is no text, as {KEY}.chat=false needs")
        return made

    def _conversation(self, row: dict[str, Any], column: str) -> _Growing:
        """Several turns; what follows the assistant's last one is left out."""
        made, turns = _Growing(), _turns(value_at(row, column), column)
        places = [place for place, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        if not places or not places[0]:
            raise ValueError(f"{column!r} has no turn of the assistant behind another one")
        made.add(self._tokenizer.prompt_ids(turns[: places[0]]), trained=False)
        for place, following in zip(places, [*places[1:], None], strict=True):
            end = self._end(turns[:place])
            made.add(self._ended(message_text(turns[place]), end), trained=True)
            if following is not None:
                between = self._tokenizer.added_ids(turns[:place], turns[place + 1 : following], end)
                made.add(between, trained=False)
        return made

    def _asked(self, prompt: Any) -> list[Message]:
        """A prompt as the tasks of a data set ask it: with the suffix at its end, behind the system's message."""
        data = self._settings.data
        asked = [Message(role="user", content=prompt)] if isinstance(prompt, str) else _turns(prompt, data.prompt)
        last = asked[-1]
        asked[-1] = Message(role=last["role"], content=message_text(last) + data.suffix)
        return asked if data.system is None else [Message(role="system", content=data.system), *asked]

    def _ended(self, answer: str, end: int) -> np.ndarray:
        return np.append(self._tokenizer.plain_ids(answer), np.int32(end))

    def _end(self, history: Sequence[Message]) -> int:
        """What ends an answer: the end token that the chat template writes behind it, else that of a text."""
        if self._end_of_turn is None:
            written = self._tokenizer.added_ids(history, (), None)[:1].tolist()
            is_end = bool(written) and written[0] in self._tokenizer.end_ids
            self._end_of_turn = written[0] if is_end else self._tokenizer.end_id
        return self._end_of_turn


def _turns(value: Any, column: str) -> list[Message]:
    """The turns of a column, with role and text alone."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} has no messages")
    return [_turn(turn, column) for turn in value]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", None) and isinstance(part.get("text"), str)


def _turn(turn: Any, column: str) -> Message:
    """Raises ValueError for what is no turn of text."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ValueError(f"{column!r} has a turn without a role")
    if turn.get("tool_calls"):
        raise ValueError(f"{column!r} has calls of tools, which are not trained")
    content = turn.get("content")
    if not isinstance(content, str | list):
        raise ValueError(f"{column!r} has a turn without text")
    if isinstance(content, list) and not all(map(_is_text, content)):
        raise ValueError(f"{column!r} has a turn with a part that is no text")
    return Message(role=turn["role"], content=message_text(Message(role=turn["role"], content=turn["content"])))
