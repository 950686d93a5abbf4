"""The task `shapes`: of which colour the squares of a drawn image are, or how many there are."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from streamrl.images import data_url, png
from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import EXACT, Completion, Environment, Message, Prompt, Score
from streamrl.tasks.images import with_images
from streamrl.tasks.order import item_at, permute
from streamrl.tasks.starter import Starter

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (40, 40, 230),
    "yellow": (230, 220, 30),
    "cyan": (30, 210, 210),
    "magenta": (220, 30, 220),
}
CELLS = 4  # of an image, two by two; each is empty or has a square
SHADES = 16  # of grey, behind them

QUESTIONS = {
    "colour": f"Which colour are the squares? Answer with one word: {', '.join(COLOURS)}.",
    "count": f"How many squares are there? Answer with one digit, 1 to {CELLS}.",
}


class ShapesArguments(TaskArguments):
    """Arguments of the task `shapes`."""

    ask: Literal["colour", "count"] = Field("colour", description="what is asked of the squares")
    letters: bool = Field(False, description="answered is the first letter of the colour, which is one token")
    question: str | None = Field(None, description="text behind the image; null: one that says what is asked")
    side: int = Field(56, ge=16, le=1024, multiple_of=4, description="pixels of an image's side")


class Shapes(Environment):
    """All choices of cells, colour and background, in a new order each epoch. Reward: 1 for the right answer, else 0.

    An image is made from its index and travels in the prompt; no file is written.
    """

    Arguments = ShapesArguments
    starter = Starter(max_new_tokens=8)
    runs_inline = True
    size: int  # prompts of an epoch

    def __init__(self, arguments: ShapesArguments, seed: int, split: str) -> None:
        self._arguments = arguments
        self._seed = seed
        self._all = len(COLOURS) * (2**CELLS - 1) * SHADES
        held_out = min(max(1, round(arguments.held_out * self._all)), self._all - 1)
        self._first = 0 if split == "probe" else held_out
        self.size = held_out if split == "probe" else self._all - held_out

    def prompt(self, index: int) -> Prompt:
        code = permute(self._first + item_at(index, self.size, self._seed), self._all, key="split")
        code, shade = divmod(code, SHADES)
        cells, colour = divmod(code, len(COLOURS))
        name = list(COLOURS)[colour]
        image = png(draw(cells + 1, COLOURS[name], 8 * shade, self._arguments.side))
        question = QUESTIONS[self._arguments.ask] if self._arguments.question is None else self._arguments.question
        messages = with_images([Message(role="user", content=question)], 1)
        return Prompt(index=index, messages=messages, images=(data_url(image),), answer=self._answer(name, cells + 1))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        right = completion.text.strip().rstrip(".").lower() == prompt.answer
        return Score(reward=float(right), parts={EXACT: float(right)})

    def _answer(self, colour: str, cells: int) -> str:
        if self._arguments.ask == "count":
            return str(cells.bit_count())
        return colour[0] if self._arguments.letters else colour


def draw(cells: int, colour: tuple[int, int, int], grey: int, side: int) -> np.ndarray:
    """uint8 [side, side, 3]: a square in each cell whose bit is set in `cells`."""
    pixels = np.full((side, side, 3), grey, np.uint8)
    cell, margin = side // 2, side // 16
    for number in range(CELLS):
        if cells >> number & 1:
            row, column = (cell * place + margin for place in divmod(number, 2))
            pixels[row : row + cell - 2 * margin, column : column + cell - 2 * margin] = colour
    return pixels
