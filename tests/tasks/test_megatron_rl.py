"""The tasks of Megatron-RL's examples: their rows, prompts and rewards, on small files with the hub's columns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.task import TaskShare
from streamrl.tasks.environment import EXACT, Completion, Environment
from streamrl.tasks.registry import build_task

DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. The last line of your response should be of "
                "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
                f'What is ${number} + {number}$?\n\nRemember to put your answer on its own line after "Answer:".',
            }
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"0-{number}"},
    }
    for number in range(10, 18)
]
AIME = [
    {"ID": f"2024-I-{number}", "Problem": f"What is ${number}^2$?", "Solution": "It is.", "Answer": number**2}
    for number in (12, 13, 14)
]
COUNTDOWN = [{"target": target, "nums": nums} for target, nums in ((42, [2, 4, 25]), (24, [3, 8]), (7, [3, 4]))]


@pytest.fixture
def task(tmp_path: Path):
    """`task(agent, split, rows, **args)`: the task on rows that are written to a file."""

    def build(agent: str, split: str = "train", rows: list[dict[str, Any]] = DAPO, **args: Any) -> Environment:
        file = tmp_path / f"{agent}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        few = {} if agent == "AIMEAgent" else {"train_count": len(rows) - 2, "held_out_count": 1}
        given = {"agent": agent, "hf_dataset_name": str(file), "cache": str(tmp_path / "cache"), **few, **args}
        return build_task(TaskShare(name="megatron_rl", args=given), seed=1, split=split)

    return build


def rewards(environment: Environment, *answers: str, finish_reason: str = "stop") -> list[tuple[float, float]]:
    """Reward and exactness of each, for the environment's first prompt; {} represents its right answer."""
    prompt = environment.prompt(0)
    nothing = np.empty(0, np.int32)

    async def score() -> list[tuple[float, float]]:
        found = []
        for text in answers:
            said = Completion(
                text=text.replace("{}", str(prompt.answer)),
                prompt_ids=nothing,
                output_ids=nothing,
                logprobs=nothing.astype(np.float32),
                spans=(),
                finish_reason=finish_reason,
            )
            judged = await environment.score(prompt, said)
            found.append((judged.reward, judged.parts[EXACT]))
        await environment.close()
        return found

    return asyncio.run(score())


def asked(environment: Environment) -> list[str]:
    return [environment.prompt(index).messages[-1]["content"] for index in range(environment.size)]


def test_dapo_asks_for_tags_in_place_of_the_line_that_the_data_set_asks_for(task):
    for question in asked(task("DAPOAgent")):
        assert question.startswith("Solve the following math problem step by step. What is $")
        assert "<answer>" in question
        assert "Answer:" not in question
    assert asked(task("DAPOAgent", instruction="Say it."))[0].endswith("?\n\nSay it.")
    assert "\\boxed{" in asked(task("DAPOAgent", answer_format="boxed"))[0]


def test_the_first_rows_are_trained_and_those_behind_them_held_out(task):
    train, probe = task("DAPOAgent"), task("DAPOAgent", "probe")
    assert (train.size, probe.size) == (6, 1)
    assert {train.prompt(index).metadata["row"] for index in range(6)} == set(range(6))
    assert probe.prompt(0).metadata["row"] == 6
    again = [*DAPO[:6], DAPO[0], DAPO[7]]  # a question of the held-out rows is not trained
    assert task("DAPOAgent", rows=again).size == 5
    with pytest.raises(ValueError, match=r"task\.args\.train_count: 16893 is not allowed where there are 8 rows"):
        task("DAPOAgent", train_count=16893)


def test_a_right_answer_at_the_end_earns_one_and_all_else_nothing(task):
    environment = task("DAPOAgent")
    right = ["<answer>{}</answer>", "<answer>1</answer> no: <answer> {} </answer>\n", "so \\boxed{{}}"]
    assert rewards(environment, *right) == [(1.0, 1.0)] * 3
    wrong = ["<answer>1</answer>", "{}", "<answer>{}</answer> I think", "<answer>{}.0</answer>", "\\boxed{{}"]
    wrong += ["<answer>1</answer> \\boxed{{}}"]  # a box counts where there are no tags
    assert rewards(environment, *wrong) == [(0.0, 0.0)] * len(wrong)
    assert rewards(environment, "<answer>{}</answer>", finish_reason="length") == [(0.0, 0.0)]


def test_each_case_has_the_reward_that_the_arguments_give_it(task):
    environment = task("DAPOAgent", format_reward=0.5, negative_reward=-1.0, partial_end_reward=0.75)
    assert environment.lowest_reward == -1.0
    said = ("<answer>{}</answer>", "<answer>{}</answer>.", "<answer>1</answer>", "{}")
    assert [reward for reward, _ in rewards(environment, *said)] == [1.0, 0.75, 0.5, -1.0]
    assert rewards(environment, "<answer>{}</answer>", finish_reason="length") == [(0.5, 0.0)]


def test_aime_is_evaluated_and_never_trained(task):
    probe = task("AIMEAgent", "probe", AIME)
    assert probe.size == 3
    assert {probe.prompt(index).answer for index in range(3)} == {"144", "169", "196"}
    assert all("<answer>" in question for question in asked(probe))
    assert rewards(probe, "<answer>{}</answer>", "<answer>1</answer>") == [(1.0, 1.0), (0.0, 0.0)]
    with pytest.raises(ValueError, match=r"task\.args\.evaluation_only: .* is for evaluation"):
        task("AIMEAgent", "train", AIME)


def test_an_equation_is_looked_for_in_the_last_line(task):
    environment = task("CountdownAgent", rows=COUNTDOWN)
    (prompt,) = [environment.prompt(index) for index in range(environment.size)]
    right = {"42": "(25 - 4) * 2", "24": "3 * 8"}[str(prompt.answer)]
    said = (f"so\n<answer>{right}</answer> done", "<answer>1 + 1</answer>", f"<answer>{right}</answer>\nso", right)
    assert [reward for reward, _ in rewards(environment, *said)] == [1.0, 0.1, 0.0, 0.0]
    assert rewards(environment, f"<answer>{right}</answer>", finish_reason="length") == [(1.0, 1.0)]


def test_a_folder_of_arrow_files_takes_the_place_of_the_hub(task, tmp_path):
    import datasets

    for name, rows in (("train", DAPO), ("test", DAPO[:3])):
        written = datasets.Dataset.from_list(rows)
        with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / f"{name}-00000.arrow")) as writer:
            for row in written:
                writer.write(row)
            writer.finalize()
    found = task("DAPOAgent", dataset_file=str(tmp_path))
    assert found.size == 6
    assert "<answer>" in asked(found)[0]
    assert task("DAPOAgent", dataset_file=str(tmp_path), split="test", train_count=2).size == 2
