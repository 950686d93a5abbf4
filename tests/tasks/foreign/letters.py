"""Environments of the library verifiers: letters to be repeated. Loaded in its own virtual environment."""

from itertools import product

import verifiers as vf
from datasets import Dataset

ANOTHER = "ha"  # what the second turn asks for


def rightness(said: str, wanted: str) -> float:
    """The share of letters that are right at their place, of the longer of the two."""
    said = said.strip()
    right = sum(one == other for one, other in zip(said, wanted, strict=False))
    return right / max(len(said), len(wanted))


def repeated(completion, answer, parser) -> float:
    return rightness(parser.parse_answer(completion[:1]) or "", answer)


def repeated_again(completion, parser) -> float:
    return rightness(parser.parse_answer(completion[1:]) or "", ANOTHER)


def ended(completion) -> float:
    return float(len(completion) > 0)


def best(completions, answers, parser) -> list[float]:
    """Of a whole group: 1 for its best answers, however bad."""
    scores = [repeated(said, wanted, parser) for said, wanted in zip(completions, answers, strict=True)]
    return [float(score == max(scores)) for score in scores]


class Twice(vf.MultiTurnEnv):
    """Another pair of letters after the first answer."""

    def __init__(self, **options):
        super().__init__(max_turns=2, **options)

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": ANOTHER}]


class Sandboxed(vf.SingleTurnEnv):
    """What the library's own class of this name is, without renting anything."""


Sandboxed.__name__ = "SandboxEnv"


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: what to say
    """
    return text.upper()


def rows(count: int) -> Dataset:
    words = ["".join(letters) for letters in product("abcdefgh", repeat=2)][:count]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": word}], "answer": word} for word in words])


def load_environment(kind: str = "single", count: int = 64):
    parser = vf.Parser()
    if kind == "twice":
        rubric = vf.Rubric(funcs=[repeated, repeated_again, ended], weights=[0.5, 0.5, 0.0], parser=parser)
        return Twice(dataset=rows(count), rubric=rubric, parser=parser)
    if kind == "tool":
        rubric = vf.Rubric(funcs=[ended], parser=parser)
        return vf.ToolEnv(dataset=rows(count), tools=[shout], max_turns=3, rubric=rubric, parser=parser)
    funcs = [best] if kind == "group" else [repeated, ended]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, 0.0][: len(funcs)], parser=parser)
    made = Sandboxed if kind == "sandbox" else vf.SingleTurnEnv
    return made(dataset=rows(count), rubric=rubric, parser=parser)
