"""Prompts that are too long, cut: which tokens stay, of which task, and what is told of it."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.generate.inference import EngineInference
from streamrl.tasks import left_out
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Prompt
from streamrl.tasks.left_out import fitting_size
from tests.tasks.test_left_out import Numbered, asked, of_task


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("cut_left", 3, [4, 5, 6]),
        ("cut_right", 3, [0, 1, 2]),
        ("cut_middle", 3, [0, 5, 6]),
        ("cut_middle", 4, [0, 1, 5, 6]),
        ("cut_middle", 1, [6]),
        ("cut_left", 7, [0, 1, 2, 3, 4, 5, 6]),
        ("cut_right", 9, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_as_many_tokens_stay_as_the_limit_says(side, limit, kept):
    ids = np.arange(7, dtype=np.int32)
    assert Cut(side, limit).kept(ids).tolist() == kept
    assert Cut(side, limit).kept(ids).dtype == np.int32


def test_a_task_whose_prompts_are_cut_leaves_none_out():
    task = Numbered(9)
    found = of_task(cut="cut_left", whole=True)
    left_out.apply({"numbers": task}, {"numbers": found}, seed=1)
    assert (task.fitting, task.cut, fitting_size(task)) == (None, Cut("cut_left", 3), 9)
    assert [prompt.text for prompt in asked(task, range(3))] == ["0", "1", "2"]
    assert found.line("numbers") == (
        "task.max_prompt_tokens: 1 of 9 prompts of numbers are cut (cut_left): above 3 tokens, the longest has 7"
    )


class Letters:
    """A tokenizer with a token a letter."""

    end_ids = (0,)

    def prompt_ids(self, prompt, tools=()):
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def handle() -> EngineInference:
    from streamrl.config.generate import GenerateConfig

    return EngineInference(None, Letters(), GenerateConfig(), None)


def test_only_the_prompt_of_the_ticket_is_cut_whatever_its_form():
    for prompt in (
        Prompt(index=0, text="abcdef"),
        Prompt(index=0, messages=({"role": "user", "content": "abc"}, {"role": "user", "content": "def"})),
    ):
        inference = handle()
        inference.cut_prompt(prompt, Cut("cut_left", 2))
        assert bytes(inference.prompt_ids(prompt.content).astype(np.uint8)) == b"ef"
        assert len(inference.prompt_ids("a further turn")) == 14


def test_a_prompt_with_images_is_not_cut():
    inference = handle()
    inference.cut_prompt(Prompt(index=3, text="abcdef", images=("a.png",)), Cut("cut_left", 2))
    with pytest.raises(ValueError, match="prompt 3: it has images and 6 tokens, and a cut might part one"):
        inference.prompt_ids("abcdef")
