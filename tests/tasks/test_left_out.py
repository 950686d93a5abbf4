"""Prompts that are too long: which index means which prompt where they are left out."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.tasks import left_out
from streamrl.tasks.environment import Completion, Environment, Prompt, Score
from streamrl.tasks.left_out import STRIDE, OfTask, fitting_prompt, fitting_size
from tests.operations_table import GOES_ON, documented


class Numbered(Environment):
    """Prompt `index` is the number index % size; without a size the index itself."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text=str(index if self.size is None else index % self.size))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        raise NotImplementedError


def of_task(**changes) -> OfTask:
    return OfTask(
        **{"limit": 3, "looked": 9, "too_long": 1, "shortest": 5, "longest": 7, "size": 9, "left_out": (), **changes}
    )


def asked(task: Environment, indices) -> list[Prompt]:
    async def tokenise(prompt: Prompt) -> np.ndarray:
        return np.arange(len(prompt.content))

    async def fetch() -> list[Prompt]:
        return [await fitting_prompt(task, index, tokenise) for index in indices]

    return asyncio.run(fetch())


@settings(max_examples=30)
@given(
    st.integers(2, 40).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size - 1))
    )
)
def test_every_epoch_has_each_prompt_that_fits_once_and_no_other(drawn):
    size, out = drawn
    task = Numbered(size)
    left_out.apply({"numbers": task}, {"numbers": of_task(size=size, left_out=tuple(sorted(out)))}, seed=1)
    fit = [str(number) for number in range(size) if number not in out]
    assert fitting_size(task) == len(fit)
    prompts = asked(task, range(3 * len(fit)))
    assert all(task.prompt(prompt.index) == prompt for prompt in prompts)
    texts = [prompt.text for prompt in prompts]
    assert texts[: len(fit)] == fit
    for epoch in range(3):
        assert sorted(texts[epoch * len(fit) : (epoch + 1) * len(fit)], key=int) == fit


def test_the_prompt_of_an_index_is_the_same_wherever_it_is_asked_for():
    def texts(indices) -> list[str | None]:
        task = Numbered(30)
        left_out.apply({"numbers": task}, {"numbers": of_task(size=30, left_out=(3, 4, 29))}, seed=5)
        return [prompt.text for prompt in asked(task, indices)]

    assert texts(range(100))[70:] == texts(range(70, 100))
    epochs = [texts(range(27 * epoch, 27 * epoch + 27)) for epoch in range(3)]
    assert all(one != other for one, other in pairwise(epochs))


def test_of_a_task_without_an_end_another_prompt_takes_the_place_of_one_that_is_too_long():
    class Endless(Numbered):
        def prompt(self, index: int) -> Prompt:
            return Prompt(index=index, text="9" * 20 if index in (3, 3 + STRIDE) else str(index))

    task = Endless(None)
    left_out.apply({"numbers": task}, {"numbers": of_task(limit=10, size=None, left_out=None)}, seed=1)
    prompts = asked(task, [2, 3, 4])
    assert [prompt.text for prompt in prompts] == ["2", str(3 + 2 * STRIDE), "4"]
    assert [prompt.index for prompt in prompts] == [2, 3 + 2 * STRIDE, 4]
    left_out.apply({"numbers": task}, {"numbers": of_task(limit=1, size=None, left_out=None)}, seed=1)
    with pytest.raises(ValueError, match="prompt 10: 64 prompts have more than 1 tokens"):
        asked(task, [10])


def test_nothing_is_changed_where_all_prompts_fit():
    task = Numbered(9)
    left_out.apply({"numbers": task}, {"numbers": of_task(too_long=0), "others": of_task()}, seed=1)
    assert task.fitting is None
    assert fitting_size(task) == 9


def test_the_record_is_read_as_it_was_written_and_says_what_is_left_out(tmp_path):
    assert left_out.load(tmp_path) == left_out.LeftOut()
    found = left_out.LeftOut(
        trained={"sums": of_task(left_out=(4,)), "copy": of_task(too_long=0)},
        evaluated={"big": of_task(looked=50_000, too_long=20, left_out=None)},
    )
    left_out.save(tmp_path, found)
    assert left_out.load(tmp_path) == found
    first, second = found.lines()
    documented(
        "task.max_prompt_tokens: ... prompts of ... are left out: above ... tokens, the longest has ...", first, GOES_ON
    )
    assert first == "task.max_prompt_tokens: 1 of 9 prompts of sums are left out: above 3 tokens, the longest has 7"
    assert "20 of a sample of 50,000 prompts of big (held out) are left out" in second
