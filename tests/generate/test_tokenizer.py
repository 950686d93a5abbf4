"""The tokenizer without torch gives what Hugging Face's gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from streamrl.generate.tokenizer import Tokenizer

TEMPLATE = """
{%- for message in messages -%}
    {%- if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif -%}
    {{ '<|' + message['role'] + '|>' }}{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ {'a': 'ü'} | tojson }}{{ '=' }}{% endif %}
"""
# What templates may use of transformers' environment.
PUBLISHED = """
{%- for message in messages -%}
    {{ message | tojson(ensure_ascii=False) }}{{ message | tojson(separators=(',', ':'), sort_keys=true) }}
    {%- if message['role'] == 'assistant' %}
        {% generation %}{% set last = message['content'] %}{{ last }}{% endgeneration %}
    {%- endif %}
{% endfor %}
"""
MESSAGES = [
    {"role": "user", "content": " abc "},
    {"role": "assistant", "content": "h"},
    {"role": "user", "content": "fa"},
]


@pytest.fixture
def model(model_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_folders[0], folder)
    return folder


def test_text_and_its_ids_are_those_of_hugging_face(model):
    ours, theirs = Tokenizer(model), AutoTokenizer.from_pretrained(model)
    for text in ("caf=", "a", "abcdefgh" * 20, ""):
        ids = ours.prompt_ids(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs(text)["input_ids"]
    outputs = [[0, 1, 2, 9], [5], []]
    assert ours.text(outputs) == theirs.batch_decode(outputs, skip_special_tokens=True)


@pytest.mark.parametrize(
    "saved",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 8},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "=",
            }
        },
    ],
)
def test_a_length_that_a_tokenizer_was_saved_with_neither_cuts_nor_fills_a_prompt(saved, model):
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | saved))
    for text in ("abcdefgh", "a"):
        assert Tokenizer(model).prompt_ids(text).tolist() == AutoTokenizer.from_pretrained(model)(text)["input_ids"]


CALLS = """
{%- for message in messages -%}
    {{ message['content'] }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}
"""


def test_arguments_of_a_tool_call_in_openais_form_are_a_mapping_to_the_template(model):
    (model / "chat_template.jinja").write_text(CALLS)

    def asked(*arguments):
        calls = [{"type": "function", "function": {"name": "add", "arguments": each}} for each in arguments]
        return [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": calls}]

    mapping, text = asked({"a": "h"}), asked('{"a": "h"}')
    assert Tokenizer(model).rendered(text) == Tokenizer(model).rendered(mapping)
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(mapping, tokenize=False)
    assert Tokenizer(model).rendered(text) == expected
    assert text == asked('{"a": "h"}')  # nothing of the caller's is changed
    assert r'"{\"a' in Tokenizer(model).rendered(asked('{"a'))  # no JSON: as it is
    no_calls = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": None}]
    assert Tokenizer(model).rendered(no_calls)


@pytest.mark.parametrize("template", [TEMPLATE, PUBLISHED])
def test_a_conversation_is_rendered_as_hugging_face_does(template, model):
    (model / "chat_template.jinja").write_text(template)
    text = AutoTokenizer.from_pretrained(model).apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    assert Tokenizer(model).rendered(MESSAGES) == text
    theirs = AutoTokenizer.from_pretrained(model)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert Tokenizer(model).prompt_ids(MESSAGES).tolist() == list(expected)


def test_a_template_that_refuses_and_a_missing_one_are_errors_with_their_reason(model):
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ValueError, match="system comes first"):
        Tokenizer(model).prompt_ids([*MESSAGES, {"role": "system", "content": "late"}])
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(ValueError, match="chat template: can only concatenate str"):
        Tokenizer(model).prompt_ids(MESSAGES)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(model).prompt_ids(MESSAGES)


def test_every_end_token_of_the_model_folder_ends_an_answer(model):
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, "text_config": {"eos_token_id": 8}}))
    assert Tokenizer(model).end_ids == tuple(sorted({end, 3, 5, 7, 8}))


def test_tokens_at_which_a_server_with_a_tokenizer_ends_an_answer_are_end_tokens(model):
    theirs = AutoTokenizer.from_pretrained(model)
    theirs.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    theirs.save_pretrained(model)
    assert Tokenizer(model).end_ids == (theirs.eos_token_id, theirs.convert_tokens_to_ids("<|eom_id|>"))


def test_what_is_between_two_answers_is_the_difference_of_two_renderings(model):
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '=' if message['role'] == 'assistant' }}{{ message['content'] }}"
        "{{ eos_token }}{% endfor %}{{ '=' if add_generation_prompt }}"
    )
    tokenizer = Tokenizer(model)
    added = [{"role": "user", "content": "fa"}]
    said = MESSAGES[:1]
    whole = tokenizer.prompt_ids([*said, {"role": "assistant", "content": "h"}, *added]).tolist()
    end = tokenizer.prompt_ids("<|endoftext|>").item()
    between = tokenizer.added_ids(said, added, last=None).tolist()
    assert between[0] == end  # the template ends an answer that did not end itself
    assert whole == [*tokenizer.prompt_ids(said).tolist(), *tokenizer.prompt_ids("h").tolist(), *between]
    assert tokenizer.added_ids(said, added, last=end).tolist() == between[1:]


def test_a_template_that_does_not_write_an_answer_as_it_is_cannot_go_on(model):
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not write an assistant's message once"):
        Tokenizer(model).added_ids(MESSAGES[:1], MESSAGES[2:], last=None)
