"""Questions from files, and answers judged in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import EXACT, FAILED, Completion
from streamrl.tasks.failures import ScorerRaised
from streamrl.tasks.math_reward import MathReward
from streamrl.tasks.questions import PARSED
from streamrl.tasks.registry import build_task

HANGS = "$9^{9^{9^9}}$"  # evaluated in one C call that no signal interrupts


@pytest.fixture
def rows(tmp_path):
    """60 rows, two of them with the same question."""
    path = tmp_path / "sums.jsonl"
    entries = [{"prompt": f"{number} + 1 =", "answer": f"work #### {number + 1}"} for number in range(59)]
    entries.append(entries[0])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return {"path": str(path), "cache": str(tmp_path / "cache"), "answer_after": "####"}


def task(split="train", seed=1, **args):
    return build_task(TaskConfig(name="jsonl", args=args), seed, split)


def answer(text: str) -> Completion:
    empty, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(text=text, prompt_ids=empty, output_ids=empty, logprobs=logprobs, spans=(), finish_reason="stop")


def test_a_row_becomes_chat_messages_or_plain_text(rows):
    prompt = task(**rows, system="Be brief.", suffix=" ?").prompt(0)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.messages[1]["content"].endswith("+ 1 = ?")
    assert int(prompt.answer) == int(prompt.messages[1]["content"].split()[0]) + 1
    plain = task(**rows, chat=False).prompt(0)
    assert plain.text == prompt.messages[1]["content"].removesuffix(" ?")


def test_columns_may_hold_messages_and_have_other_names(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [[{"role": "user", "content": f"What is {number}?"}] for number in range(8)]
    path.write_text("".join(json.dumps({"q": turn, "a": number}) + "\n" for number, turn in enumerate(turns)))
    environment = task(path=str(path), cache=str(tmp_path / "cache"), prompt="q", answer="a", suffix=" Go.")
    prompt = environment.prompt(0)
    assert prompt.messages == ({"role": "user", "content": f"What is {prompt.answer}? Go."},)


CALLS = [{"id": "c1", "type": "function", "function": {"name": "area", "arguments": {"city": "Rome"}}}]


def test_messages_keep_their_calls_and_lose_what_a_column_adds(tmp_path):
    called = [
        {"role": "user", "content": "How large?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "1285", "tool_call_id": "c1"},
    ]
    path = tmp_path / "calls.jsonl"
    plain = [[{"role": "user", "content": f"{number}?"}] for number in range(4)]
    path.write_text("".join(json.dumps({"prompt": turns, "answer": 1}) + "\n" for turns in [called, *plain]))
    environment = task(path=str(path), cache=str(tmp_path / "cache"), suffix=" km2")
    found = [environment.prompt(index).messages for index in range(environment.size)]
    assert {len(messages) for messages in found} == {1, 3}
    assert all(set(messages[0]) == {"role", "content"} for messages in found)
    (user, assistant, tool) = next(messages for messages in found if len(messages) == 3)
    assert user["content"] == "How large?"
    assert assistant == {"role": "assistant", "tool_calls": CALLS}
    assert tool == {"role": "tool", "content": "1285 km2", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "value", [7, [], ["hi"], {"role": "user", "content": "hi"}, [{"from": "human", "value": "hi"}]]
)
def test_a_prompt_that_is_no_prompt_is_refused_in_one_line(tmp_path, value):
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"prompt": value, "answer": 1, "n": number}) + "\n" for number in range(4)))
    with pytest.raises(ValueError, match=r"task\.args\.prompt: the prompt of index 0 is .*; allowed: text, or a list"):
        task(path=str(path), cache=str(tmp_path / "cache"), evaluation_only=True, split="probe")


def test_a_whole_number_is_the_same_text_whatever_other_rows_have(tmp_path):
    path = tmp_path / "numbers.jsonl"
    answers = {"2+3=": 5, "5/2=": 2.5, "2+4=": 6, "2+5=": -7, "10**17=": 10**17}
    path.write_text("".join(json.dumps({"prompt": each, "answer": answers[each]}) + "\n" for each in answers))
    rows = {"path": str(path), "cache": str(tmp_path / "cache"), "chat": False}
    parts = task(**rows), task("probe", **rows)
    found = [part.prompt(index) for part in parts for index in range(part.size)]
    assert {prompt.text: prompt.answer for prompt in found} == {each: str(answers[each]) for each in answers}
    written = task(**rows, template="{answer}!")
    assert {written.prompt(index).text for index in range(written.size)} <= {f"{each}!" for each in answers.values()}


@pytest.mark.parametrize("key", ["revision", "subset", "split", "test_split"])
def test_what_a_file_has_no_use_for_is_refused(rows, key):
    line = rf"task\.args\.{key}: 'x' is of a data set of the hub, and path is a file; allowed: without it \(test_path"
    with pytest.raises(ValueError, match=line):
        build_task(TaskConfig(name="jsonl", args={**rows, key: "x"}), 1, "train")


def test_a_known_data_set_is_also_read_from_a_file(rows):
    """Its own subset and split are of the hub's."""
    args = {"path": rows["path"], "cache": rows["cache"], "prompt": "prompt"}
    assert build_task(TaskConfig(name="gsm8k", args=args), 1, "train").size > 10


def test_texts_that_look_like_dates_are_texts(tmp_path):
    path = tmp_path / "dates.jsonl"
    rows = [
        {"prompt": f"Day {day}?", "answer": f"2024-01-0{day}", "of": {"at": [f"2024-01-0{day}T10:00:00Z"]}}
        for day in range(1, 6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = task(path=str(path), cache=str(tmp_path / "cache"))
    found = [environment.prompt(index) for index in range(environment.size)]
    assert {prompt.answer for prompt in found} <= {row["answer"] for row in rows}
    assert all(prompt.metadata["values"] in rows for prompt in found)


def test_a_cell_of_a_csv_file_is_the_text_that_is_there(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt,answer,n\r\n12,007,1\r\n13,None,2\r\n14,NA,\r\n15,2.50,4\r\n")
    environment = task(path=str(path), cache=str(tmp_path / "cache"), chat=False)
    probe = task("probe", path=str(path), cache=str(tmp_path / "cache"), chat=False)
    found = [each.prompt(index) for each in (environment, probe) for index in range(each.size)]
    assert {prompt.text: prompt.answer for prompt in found} == {"12": "007", "13": "None", "14": "NA", "15": "2.50"}
    assert {prompt.metadata["values"]["n"] for prompt in found} == {1.0, 2.0, None, 4.0}


def test_a_template_reads_into_mappings_and_must_have_a_column(tmp_path):
    path = tmp_path / "nested.jsonl"
    path.write_text("".join(json.dumps({"sum": {"left": number}, "answer": 1}) + "\n" for number in range(4)))
    rows = {"path": str(path), "cache": str(tmp_path / "cache"), "chat": False}
    assert re.fullmatch(r"\d \+ \\boxed\{\}", task(**rows, template="{sum.left} + \\boxed{}").prompt(0).text)
    with pytest.raises(ValueError, match=r"task\.args\.template: 'Go \{the sum\}' has no column"):
        task(**rows, template="Go {the sum}")


def test_epochs_show_every_training_row_once_and_never_a_probe(rows):
    train, probe = task(**rows), task("probe", **rows)
    epochs = [[train.prompt(epoch * train.size + place) for place in range(train.size)] for epoch in range(2)]
    shown = [[prompt.metadata["row"] for prompt in prompts] for prompts in epochs]
    assert sorted(shown[0]) == sorted(shown[1])
    assert shown[0] != shown[1]
    assert len(set(shown[0])) == train.size
    questions = [{env.prompt(place).messages[0]["content"] for place in range(env.size)} for env in (train, probe)]
    assert not questions[0] & questions[1]
    assert len(questions[0]) + len(questions[1]) == 59
    assert train.size + probe.size == 60


def test_a_resume_at_any_index_goes_on_with_the_same_prompts(rows):
    first, resumed = task(**rows), task(**rows)
    whole = [first.prompt(index) for index in range(70)]
    assert [resumed.prompt(index) for index in range(33, 70)] == whole[33:]


def test_answers_are_judged_as_mathematics_and_a_hanging_one_costs_its_sample(rows):
    async def judged(texts: list[str], timeout: float):
        environment = task(**rows, score_timeout=timeout, score_processes=2)
        rollouts = await environment.score_all(environment.prompt(0), [answer(text) for text in texts])
        pids = environment._math.pids
        await environment.close()
        await environment.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        return rollouts

    gold = task(**rows).prompt(0).answer
    right = [f"it is \\boxed{{{gold}}}", f"${gold}.0$", f"{gold}"]
    wrong = ["", "banana", "\\boxed{", "-1", "x" * 3000, "\x00", "{}\n{}"]
    normal = asyncio.run(judged([*right, *wrong], timeout=60.0))
    assert [rollout.reward for rollout in normal] == [1.0] * 3 + [0.0] * 7
    assert all(rollout.parts[EXACT] == rollout.reward for rollout in normal)
    assert [rollout.parts[PARSED] for rollout in normal] == [1.0] * 3 + [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    hanging, after = asyncio.run(judged([HANGS, right[0]], timeout=5.0))
    assert hanging.reward == 0.0
    assert hanging.parts == {FAILED: 1.0}
    assert "more than 5 s" in hanging.failure
    assert after.reward == 1.0


def test_a_right_answer_that_cannot_be_read_is_a_failure_not_a_wrong_answer():
    async def ask():
        async with MathReward(processes=1, timeout=5.0, start_timeout=60.0) as judge:
            with pytest.raises(ScorerRaised, match="is not mathematics"):
                await judge.is_right("4", gold="")
            assert await judge.is_right("4", gold="4")
            os.kill(judge.pids[0], signal.SIGKILL)
            await asyncio.sleep(0.2)
            assert await judge.is_right("1/2", gold="0.5")

    asyncio.run(ask())


def test_no_judge_outlives_its_worker_even_in_the_middle_of_an_endless_answer():
    worker = textwrap.dedent(
        f"""
        import asyncio
        from streamrl.tasks.math_reward import MathReward

        async def main():
            judge = MathReward(processes=1, timeout=600.0, start_timeout=60.0)
            await judge.is_right("1", gold="1")
            print(judge.pids[0], flush=True)
            await judge.is_right({HANGS!r}, gold="1")

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        judge = psutil.Process(pid)
        started = judge.cpu_times().user
        deadline = time.monotonic() + 30
        while judge.cpu_times().user < started + 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    judge.wait(timeout=10)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"path": "/nowhere/rows.jsonl"}, r"task\.args\.path: '/nowhere/rows.jsonl' cannot be loaded"),
        ({"path": None}, r"task\.args\.path: None is not allowed"),
        (
            {"prompt": "promt"},
            r"task\.args\.prompt: 'promt' is not allowed; allowed: one of prompt, answer; nearest .*: prompt",
        ),
        ({"anwser": "a"}, r"task\.args\.anwser: unknown key .*nearest known key: task\.args\.answer"),
        ({"score_timeout": 0}, r"task\.args\.score_timeout: 0 is not allowed .*> 0"),
    ],
)
def test_bad_arguments_give_one_line_that_names_the_key(rows, args, line):
    with pytest.raises(ValueError, match=f"^{line}") as refused:
        task(**(rows | args))
    assert "\n" not in str(refused.value)


def test_the_path_must_be_given():
    with pytest.raises(ValueError, match=r"^task\.args\.path: nothing is not allowed"):
        task()
