"""Rows as tokens: what the policy will meet in a run, with the loss on the answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch import tiny_model
from streamrl.config.sft import SftConfig
from streamrl.generate.tokenizer import Tokenizer
from streamrl.sft.tokens import RowTokens

END, ASK = 0, 1  # the tiny tokenizer: the end, "=", then a to h
A, B, C, D = 2, 3, 4, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template ends a turn of the assistant by the letter h, which ends answers, too."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tiny_model.make_tokenizer(8)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}hg{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    return folder


def made(folder: Path, row: dict, train_on: str = "answers", **data) -> tuple[list[int], list[int]]:
    settings = SftConfig.model_validate({"train_on": train_on, "data": data})
    ids, trained = RowTokens(Tokenizer(folder), settings).of(row)
    assert (ids.dtype, trained.dtype) == (np.int32, np.bool_)
    return ids.tolist(), trained.astype(int).tolist()


H, G = 9, 8


def test_plain_text_is_trained_from_the_answer_to_the_end_token(folder):
    row = {"prompt": "ab", "answer": "cd"}
    assert made(folder, row, chat=False, suffix="=") == ([A, B, ASK, C, D, END], [0, 0, 0, 1, 1, 1])


def test_a_prompt_goes_through_the_template_and_an_answer_ends_as_the_template_ends_a_turn(folder):
    row = {"question": {"text": "ab"}, "right": "cd"}
    columns = {"prompt": "question.text", "answer": "right"}
    assert made(folder, row, **columns) == ([A, B, ASK, C, D, H], [0, 0, 0, 1, 1, 1])
    assert made(folder, row, **columns, system="d", suffix="a")[0] == [D, A, B, A, ASK, C, D, H]
    asked = {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": 7}
    assert made(folder, asked)[0] == [A, B, ASK, H]  # the tiny tokenizer knows no digit
    parts = [{"type": "text", "text": "a"}, {"text": "b", "type": None}]
    assert made(folder, {"prompt": [{"role": "user", "content": parts}], "answer": "c"})[0] == [A, B, ASK, C, H]


def test_a_whole_number_is_answered_without_a_fraction(folder, monkeypatch):
    answered = []
    monkeypatch.setattr(Tokenizer, "plain_ids", lambda _, text: answered.append(text) or np.zeros(1, np.int32))
    for chat in (True, False):
        for answer in (5.0, 0.5, 7):  # a column of which one row has a fraction
            made(folder, {"prompt": "a", "answer": answer}, chat=chat)
    assert [text for text in answered if text != "hg="] == ["5", "0.5", "7"] * 2  # else what ends a turn


def test_each_turn_of_the_assistant_is_trained_and_what_is_between_two_is_not(folder):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "never read")]
    row = {"messages": [{"role": role, "content": text, "name": None} for role, text in turns]}
    ids, trained = made(folder, row, messages="messages")
    assert ids == [A, ASK, B, H, G, C, ASK, D, H]
    assert trained == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert made(folder, row, "all", messages="messages")[1] == [0] + [1] * 8


@pytest.mark.parametrize(
    ("row", "data", "reason"),
    [
        ({"prompt": "a", "answer": None}, {}, "'answer' is no text"),
        ({"prompt": None, "answer": "a"}, {}, "'prompt' has no messages"),
        ({"prompt": [], "answer": "a"}, {"chat": False}, "'prompt' is no text"),
        ({"prompt": "?", "answer": "a"}, {"chat": False}, "makes no token of its prompt"),
        ({"m": [{"role": "assistant", "content": "a"}]}, {"messages": "m"}, "no turn of the assistant behind another"),
        ({"m": [{"role": "user", "content": "a"}]}, {"messages": "m"}, "no turn of the assistant behind another"),
        ({"m": [{"role": "user", "content": None}]}, {"messages": "m"}, "a turn without text"),
        ({"m": [{"content": "a"}]}, {"messages": "m"}, "a turn without a role"),
        ({"m": [{"role": "user", "content": ["a"]}]}, {"messages": "m"}, "a part that is no text"),
        ({"m": [{"role": "user", "content": [{"type": "image"}]}]}, {"messages": "m"}, "a part that is no text"),
        ({"prompt": [{"role": "user", "content": [None]}], "answer": "a"}, {}, "a part that is no text"),
        ({"m": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, {"messages": "m"}, "calls of tools"),
    ],
)
def test_a_row_that_cannot_be_trained_says_why(folder, row, data, reason):
    with pytest.raises(ValueError, match=reason):
        made(folder, row, **data)
