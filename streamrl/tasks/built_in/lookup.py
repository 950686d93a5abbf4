"""The task `lookup`: a call, a tool's answer that nobody can guess, and an answer that uses it.

    prompt "ca="    policy "ca" (the call)    tool "gb=" (what is kept under "ca")    policy "gb"

A tiny model learns it from random weights in minutes, and it shows that several turns are generated, masked and
trained as they should be: without the tool's answer no reward above 1/2 is to be had.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.tasks.built_in.copy import Copy
from streamrl.tasks.environment import EXACT, Completion, Prompt, Score
from streamrl.tasks.order import digest
from streamrl.tasks.strings import STARTER, StringsArguments
from streamrl.tasks.turns import TurnByTurn

# The reward part that is 1.0 where the tool was called as it must be, else 0.0.
CALLED = "called"


class Lookup(TurnByTurn):
    """All keys of one length, in a new order each epoch; each prompt index keeps another value under its key.

    Reward: half for the call, half for the answer, each the share of tokens that are right at their place, the end
    included. A wrong call is not answered.
    """

    Arguments = StringsArguments
    starter = STARTER
    max_turns = 2

    def __init__(self, arguments: StringsArguments, seed: int, split: str) -> None:
        self._keys = Copy(arguments, seed, split)
        self._alphabet = arguments.alphabet
        self._length = arguments.length
        self._seed = seed
        self.size = self._keys.size

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`: the key, and "=". Its answer is the value."""
        asked = self._keys.prompt(index)
        places = [digest(f"lookup/{self._seed}/{index}/{place}") for place in range(self._length)]
        value = "".join(self._alphabet[place % len(self._alphabet)] for place in places)
        return Prompt(index=index, text=asked.text, answer=value, metadata={"key": asked.answer})

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> str | None:
        return f"{prompt.answer}=" if _rightness(turns[0], prompt.metadata["key"]) == 1.0 else None

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        call = _rightness(turns[0], prompt.metadata["key"])
        answer = _rightness(turns[1], prompt.answer or "") if len(turns) == 2 else 0.0
        parts = {EXACT: float(call == answer == 1.0), CALLED: float(call == 1.0)}
        return Score(reward=(call + answer) / 2, parts=parts)


def _rightness(turn: Completion, target: str) -> float:
    """The share of tokens that are right at their place, the end included, of the longer of answer and target."""
    given = turn.text.strip()
    right = sum(wanted == symbol for wanted, symbol in zip(target, given, strict=False))
    ended = turn.finish_reason == "stop" and len(given) == len(target)
    return (right + ended) / (max(len(target), len(given)) + 1)
