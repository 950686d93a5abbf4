"""What a newcomer needs to begin with a task: its first arguments, and files beside the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Any

FOLDER = "{folder}"  # in an argument: the folder of the files, as an absolute path


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """What `streamrl init --task NAME` writes.

    Example: `Starter(args={"path": "{folder}/data.jsonl"}, files={"data.jsonl": "..."}, shown=("held_out",))`.
    """

    args: Mapping[str, Any] = field(default_factory=dict)  # of `task.args`, beyond the task's own defaults
    files: Mapping[str, str] = field(default_factory=dict)  # name: content
    shown: tuple[str, ...] | None = None  # further arguments, in a comment; None: all
    max_new_tokens: int = 16  # of an answer

    def args_in(self, folder: str) -> dict[str, Any]:
        """The arguments with the folder's path in them."""
        return {key: _placed(value, folder) for key, value in self.args.items()}


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(FOLDER, folder)
    if isinstance(value, Mapping):
        return {key: _placed(each, folder) for key, each in value.items()}
    return [_placed(each, folder) for each in value] if isinstance(value, list | tuple) else value


def backwards_rows() -> str:
    """Words of three letters, to be written backwards: a model of any size has something to learn from them."""
    words = ("".join(letters) for letters in permutations("abcdefgh", 3))
    rows = ({"prompt": f"Write backwards: {word}", "answer": word[::-1]} for word in islice(words, 0, None, 3))
    return "".join(f"{json.dumps(row)}\n" for row in rows)


BACKWARDS_REWARD = '''"""The reward of an answer: the share of its letters that are right at their place."""


def reward(text: str, answer: str, row: dict, finish_reason: str) -> float:
    given = text.strip()
    right = sum(one == other for one, other in zip(given, answer))
    return right / max(len(given), len(answer))
'''

BACKWARDS_FILES = {"rewards.py": BACKWARDS_REWARD, "data.jsonl": backwards_rows()}

BACKWARDS_ARGS = {
    "path": f"{FOLDER}/data.jsonl",
    "prompt": "prompt",
    "answer": "answer",
    "reward": f"{FOLDER}/rewards.py:reward",
}
