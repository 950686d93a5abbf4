"""Tasks of short strings, such as `copy`, that a tiny model learns from random weights in minutes."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field, model_validator

from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import EXACT, Completion, Environment, Prompt, Score
from streamrl.tasks.order import item_at, permute
from streamrl.tasks.starter import Starter

STARTER = Starter(args={"length": 3, "alphabet": "abcdefgh"}, max_new_tokens=8)


class StringsArguments(TaskArguments):
    """Arguments of every task of strings."""

    length: int = Field(3, ge=1, le=64, description="symbols of a string")
    alphabet: str = Field("abcdefgh", min_length=2, description="the symbols, in order, each one token of the model")

    @model_validator(mode="after")
    def _symbols_differ(self) -> StringsArguments:
        if len(set(self.alphabet)) < len(self.alphabet) or set(self.alphabet) & set("= \t\n"):
            raise ValueError(
                f"alphabet: {self.alphabet!r} is not allowed; allowed: different symbols, no '=', no space"
            )
        return self


class Strings(Environment):
    """All strings of one length over an alphabet, in a new order each epoch.

    Reward: the share of tokens that are right at their place, the end included, of the longer of answer and
    target. The longer counts, because a policy that has lost its end would else sit at length / (length + 1)
    with nothing to gain.
    """

    Arguments = StringsArguments
    starter = STARTER
    size: int  # prompts of an epoch

    def __init__(self, arguments: StringsArguments, seed: int, split: str) -> None:
        self._length = arguments.length
        self.alphabet = arguments.alphabet
        self._seed = seed
        self._all: int = len(self.alphabet) ** self._length
        held_out = min(max(1, round(arguments.held_out * self._all)), self._all - 1)
        self._first = 0 if split == "probe" else held_out
        self.size = held_out if split == "probe" else self._all - held_out
        # The order by which strings are parted does not depend on the seed: every run has the same probes.

    @abstractmethod
    def answer(self, symbols: str) -> str:
        """The right answer to a string."""

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`; one epoch has `size` of them."""
        place = self._first + item_at(index, self.size, self._seed)
        code = permute(place, self._all, key="split")
        symbols = self._symbols(code)
        return Prompt(index=index, text=symbols + "=", answer=self.answer(symbols))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        target = prompt.answer or ""
        given = completion.text.strip()
        right = sum(wanted == symbol for wanted, symbol in zip(target, given, strict=False))
        ended = completion.finish_reason == "stop" and len(given) == len(target)
        return Score(
            reward=(right + ended) / (max(len(target), len(given)) + 1),
            parts={EXACT: float(ended and right == len(target))},
        )

    def _symbols(self, code: int) -> str:
        """The string whose number, in base len(alphabet), is `code`."""
        symbols = ""
        for _ in range(self._length):
            code, digit = divmod(code, len(self.alphabet))
            symbols += self.alphabet[digit]
        return symbols
