"""The known data sets, read from small files with the columns that they have on the hub."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from streamrl.choices import TASKS
from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.environment import EXACT, Completion
from streamrl.tasks.questions import Questions, QuestionsArguments
from streamrl.tasks.registry import build_task
from tests.hub.cached import FIRST, SECOND, cache
from tests.operations_table import documented

DATA = Path("tests/tasks/data")
GOLD = {
    "gsm8k": {"288", "1,266", "11", "200"},
    "math": {"\\frac{1}{2}", "7", "24"},
    "dapo_math": {"9", "58", "8"},
    "aime_2024": {"024", "057"},
    "openmath": {"9"},
    "big_math": {"6", "\\frac{1}{8}"},
    "countdown": {"42", "24", "7"},
    "geo3k": {"5", "4", "2\\sqrt{3}"},
}


@pytest.fixture
def known(tmp_path):
    """`known(name, split)`: the task on its small file, and nothing else changed but how many prompts are held out."""

    def build(name: str, split: str = "train", **args):
        few = {"held_out_count": 1} if "held_out_count" in TASKS.load(name).defaults else {}
        local = {"path": str(DATA / f"{name}.jsonl"), "cache": str(tmp_path), **few, **args}
        return build_task(TaskConfig(name=name, args=local), seed=1, split=split)

    return build


def prompts(environment):
    return [environment.prompt(index) for index in range(environment.size)]


def reward(environment, prompt, text: str):
    empty = np.zeros(0, np.int32)
    given = Completion(
        text=text, prompt_ids=empty, output_ids=empty, logprobs=np.zeros(0, np.float32), spans=(), finish_reason="stop"
    )

    async def score():
        try:
            return await environment.score(prompt, given)
        finally:
            await environment.close()

    score = asyncio.run(score())
    return score.reward, score.parts[EXACT]


def test_the_defaults_of_every_data_set_are_arguments():
    sets = {name: TASKS.load(name) for name in TASKS.names if issubclass(TASKS.load(name), Questions)}
    assert GOLD.keys() == {name for name, task in sets.items() if task.defaults}
    own = [task for task in sets.values() if issubclass(task.Arguments, QuestionsArguments)]
    assert len(own) == len(sets) - 1  # megatron_rl has Megatron-RL's
    for task in own:
        task.Arguments.model_validate({"path": "some.jsonl", **task.defaults})


@pytest.mark.parametrize("name", [name for name in GOLD if name != "aime_2024"])
def test_both_splits_of_a_data_set_hold_its_questions_and_its_right_answers(known, name):
    train, probe = prompts(known(name)), prompts(known(name, "probe"))
    assert {prompt.answer for prompt in [*train, *probe]} == GOLD[name]
    asked = [{str(prompt.messages[-1]["content"]) for prompt in split} for split in (train, probe)]
    assert asked[0]
    assert asked[1]
    assert not asked[0] & asked[1]


def test_a_test_set_of_its_own_is_held_out_and_its_questions_are_not_trained(known):
    test = str(DATA / "gsm8k_test.jsonl")
    train, probe = prompts(known("gsm8k", test_path=test)), prompts(known("gsm8k", "probe", test_path=test))
    assert {prompt.answer for prompt in train} == {"288", "1,266", "200"}
    assert {prompt.answer for prompt in probe} == {"140", "11"}


def test_repeated_questions_are_asked_once_where_the_table_says_so(known):
    sizes = {name: known(name).size + known(name, "probe").size for name in ("dapo_math", "openmath")}
    assert sizes == {"dapo_math": 3, "openmath": 2}
    assert known("dapo_math", held_out_count=2).size == 1


def test_a_data_set_for_evaluation_is_asked_whole_and_never_trained(known, tmp_path):
    assert known("aime_2024", "probe").size == 2
    with pytest.raises(ValueError, match=r"^task\.args\.evaluation_only: .*aime_2024.jsonl is for evaluation"):
        known("aime_2024")
    args = {"path": str(DATA / "math.jsonl"), "cache": str(tmp_path)}
    assert build_task(TaskShare(name="math", evaluation_only=True, args=args), seed=1, split="probe").size == 3


def test_the_right_answer_in_the_form_of_each_data_set_is_right(known):
    boxed = known("gsm8k")
    prompt = next(prompt for prompt in prompts(boxed) if prompt.answer == "1,266")
    assert prompt.messages[0]["content"].endswith("within \\boxed{}.")
    assert reward(boxed, prompt, "so it is \\boxed{1266}.") == (1.0, 1.0)
    line = known("dapo_math")
    prompt = line.prompt(0)
    assert reward(line, prompt, f"Some words.\nAnswer: {prompt.answer}") == (1.0, 1.0)
    assert reward(line, prompt, "Answer: 12345") == (-1.0, 0.0)
    assert reward(line, prompt, "I do not know") == (-1.0, 0.0)


def test_countdown_asks_with_its_numbers_and_gives_1_or_a_tenth_or_nothing(known):
    countdown = known("countdown")
    both = [*prompts(countdown), *prompts(known("countdown", "probe"))]
    prompt = next(prompt for prompt in both if prompt.answer == "42")
    assert "[2, 4, 25]" in prompt.messages[0]["content"]
    assert "equals 42" in prompt.messages[0]["content"]
    assert reward(countdown, prompt, "<answer>(25 - 4) * 2</answer>") == (1.0, 1.0)
    assert reward(countdown, prompt, "<answer>25 + 4 * 2</answer>") == (0.1, 0.0)
    assert reward(countdown, prompt, "<answer>42</answer>") == (0.0, 0.0)
    assert reward(countdown, prompt, "42") == (0.0, 0.0)


def test_parquet_is_read_with_columns_inside_of_columns(known, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (DATA / "dapo_math.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    environment = known("dapo_math", path=str(tmp_path / "rows.parquet"))
    assert {prompt.answer for prompt in prompts(environment)} < GOLD["dapo_math"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"train_count": 2, "held_out_count": 1, "distinct": True},
            r"task\.args.*distinct: True has no effect where ",
        ),
        ({"held_out_count": 3}, r"task\.args\.held_out_count: 3 is not allowed where there are 3 .* up to 2"),
        ({"answer": "reward_model.truth"}, r"task\.args\.answer: 'reward_model\.truth' is not allowed"),
        ({"template": "{promt}"}, r"task\.args\.template\.promt: 'promt' is not allowed; .*nearest .*: prompt"),
        ({"reward_partial": -2}, r"task\.args\.reward_partial: -2 is not allowed between"),
        ({"form": "box"}, r"task\.args\.form: 'box' is not allowed .*whole, tagged, boxed, line"),
        ({"test_path": "nowhere.jsonl"}, r"task\.args\.test_path: 'nowhere.jsonl' cannot be loaded"),
    ],
)
def test_bad_arguments_give_one_line_that_names_the_key(known, args, line):
    with pytest.raises(ValueError, match=f"^{line}") as refused:
        known("dapo_math", **args)
    assert "\n" not in str(refused.value)


# -- by its name, from the hub's cache

CARD = b"""---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]}
- {config_name: socratic, data_files: [{split: train, path: main/test.jsonl}]}
---
"""


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The hub's cache, with `openai/gsm8k`, where the hub is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {"train": (DATA / "gsm8k.jsonl").read_bytes(), "test": (DATA / "gsm8k_test.jsonl").read_bytes()}
    stored = {"README.md": CARD, **{f"main/{split}.jsonl": content for split, content in files.items()}}
    cache(tmp_path / "hub", "openai/gsm8k", stored, kind="dataset")
    stored["main/train.jsonl"] = b"".join(files["train"].splitlines(keepends=True)[:2])
    cache(tmp_path / "hub", "openai/gsm8k", stored, SECOND, kind="dataset", ref="small")
    return tmp_path / "hub"


def test_a_data_set_in_the_hubs_cache_is_read_offline_at_any_revision(known, offline):
    def size(**args) -> int:
        return known("gsm8k", path="openai/gsm8k", **args).size

    assert [size(), size(revision=FIRST), size(revision="small")] == [3, 3, size(revision=SECOND)]
    assert size(revision="small") < 3


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"revision": "v2"}, "task.args.path: revision v2 of 'openai/gsm8k' is not whole in "),
        ({"path": "org/none"}, "allowed: after `HF_HUB_OFFLINE=0 hf download org/none --repo-type dataset`, or"),
        ({"subset": "mian"}, "task.args.subset: 'mian' is not allowed; allowed: one of main, socratic; nearest"),
        ({"subset": None}, "task.args.subset: 'null' is not allowed; allowed: one of main, socratic"),
        ({"split": "trian"}, "task.args.split: 'trian' is not allowed; allowed: one of train, test"),
        ({"test_split": "tests"}, "task.args.test_split: 'tests' is not allowed; allowed: one of train, test"),
    ],
)
def test_what_a_data_set_has_not_is_one_line_that_lists_what_it_has(offline, tmp_path, args, line):
    args = {"path": "openai/gsm8k", "cache": str(tmp_path), **args}
    with pytest.raises(ValueError, match=r"^task\.args\.") as refused:
        build_task(TaskConfig(name="gsm8k", args=args), seed=1, split="train")
    said = str(refused.value)
    assert line in said
    assert "\n" not in said
    if "trian" in args.values():
        documented("task.args.split: ... is not allowed; allowed: one of ...", said, 2)
    if "v2" in args.values():
        documented("task.args.path: revision ... of ... is not whole in ..., and ...; allowed: after ...", said, 2)
