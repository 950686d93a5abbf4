"""Where answers are found, what they are worth, and functions of the user's that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from fractions import Fraction

import numpy as np
import psutil
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks import countdown
from streamrl.tasks.answers import Found, find_answer
from streamrl.tasks.arithmetic import evaluate
from streamrl.tasks.environment import FAILED, Completion
from streamrl.tasks.registry import build_task


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("tagged", "so <answer> 12 </answer>", ("12", False)),
        ("tagged", "<answer>1</answer> no, <answer>\\boxed{2}</answer> really", ("2", True)),
        ("tagged", "<answer>12", None),
        ("tagged", "12</answer>", None),
        ("tagged", "<answer> </answer>", None),
        ("boxed", "it is $\\boxed{\\frac{1}{2}}$.", ("\\frac{1}{2}", False)),
        ("boxed", "\\boxed{1} or \\boxed{\\{1, 2\\}} maybe", ("\\{1, 2\\}", True)),
        ("boxed", "\\boxed{1", None),
        ("boxed", "\\boxed{}", None),
        ("line", "Words.\nAnswer: $34$\n", ("$34$", False)),
        ("line", "**Answer:** 34 **", ("34", False)),
        ("line", "answer: 3\nand more", ("3", True)),
        ("line", "34", None),
        ("whole", " 34 ", ("34", False)),
        ("whole", " ", None),
    ],
)
def test_the_last_answer_of_a_form_is_found(form, text, found):
    assert find_answer(text, form) == (found and Found(*found))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1 + 2 * 3", 7), ("(1 + 2) / 6", Fraction(1, 2)), ("-4 + 0.1", Fraction(-39, 10)), ("3 × 8 ÷ 2 − 1", 11)],
)
def test_arithmetic_is_exact(text, value):
    assert evaluate(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "banana", "2 ** 9", "7 // 2", "1 / 0", "1 1", "(1", "(" * 250, "1, 2", "...", "1 = 1", "1" * 300),
        *("__import__", "9e999", "1\n+1", "1\x00", "0x10", "1_0", "True"),
    ],
)
def test_what_is_no_arithmetic_is_refused_with_one_line(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        evaluate(text)


def test_countdown_wants_every_number_once():
    wanted = {"2*2+3": True, "2+3+2": True, "2*3-2": False, "3+2": None, "2*2+3+2-2": None, "7": None, "x": None}
    assert {text: countdown.verdict(text, [2, 2, 3], 7) for text in wanted} == wanted


@pytest.fixture
def sums(tmp_path):
    """`sums(**args)`: a task whose right answer is always 7."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + {7 - n}", "answer": "7", "n": n}) + "\n" for n in range(9)))

    def build(**args):
        args = {"path": str(path), "cache": str(tmp_path / "cache"), "start_timeout": 100.0, **args}
        return build_task(TaskConfig(name="jsonl", args=args), seed=1, split="train")

    return build


def judged(environment, *texts: str, finish_reason: str = "stop"):
    """The rollouts of these texts; their judges have ended."""

    async def score():
        empty = np.zeros(0, np.int32)
        completions = [
            Completion(
                text=text,
                prompt_ids=empty,
                output_ids=empty,
                logprobs=np.zeros(0, np.float32),
                spans=(),
                finish_reason=finish_reason,
            )
            for text in texts
        ]
        try:
            return await environment.score_all(environment.prompt(0), completions)
        finally:
            await environment.close()

    rollouts = asyncio.run(score())
    assert not [child for child in psutil.Process().children() if "user_reward" in " ".join(child.cmdline())]
    return rollouts


def test_the_four_cases_of_an_answer_have_rewards_and_parts_of_their_own(sums):
    rewards = {"reward_right": 1.0, "reward_partial": 0.5, "reward_wrong": 0.1, "reward_unparsed": -1.0}
    environment = sums(form="tagged", judge="text", **rewards)
    texts = ("<answer>7</answer>", "<answer>7</answer> or so", "<answer>8</answer>", "7")
    rollouts = judged(environment, *texts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.5, 0.1, -1.0]
    parts = [(rollout.parts["exact"], rollout.parts["parsed"], rollout.parts["partial"]) for rollout in rollouts]
    assert parts == [(1, 1, 0), (1, 1, 1), (0, 1, 0), (0, 0, 0)]
    (cut,) = judged(environment, texts[0], finish_reason="length")
    assert cut.reward == 0.5


def test_a_box_is_judged_as_mathematics_and_an_unreadable_one_is_unparsed(sums):
    environment = sums(form="boxed", reward_wrong=0.1, reward_unparsed=-1.0)
    rollouts = judged(environment, "\\boxed{\\frac{14}{2}}", "\\boxed{8}", "\\boxed{,}")
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.1, -1.0]


REWARD = """
    import os, time

    def reward(text, answer, row, finish_reason):
        print("noise")
        match text:
            case "raise": raise KeyError("no such thing")
            case "hang":
                while True: pass
            case "exit": os._exit(3)
            case "leave": raise SystemExit(1)
            case "memory": return len(bytearray(1 << 40))
            case "nan": return float("nan")
            case "word": return "a lot"
            case "parts": return {"reward": 0.5, "short": 1, "row": row["n"]}
        return float(text == answer)

    data = 1
"""


def test_a_reward_of_the_users_may_do_what_it_likes_and_costs_its_sample_alone(sums, tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(REWARD))
    environment = sums(reward=f"{tmp_path}/mine.py:reward", score_timeout=2.0, score_processes=1)
    bad = ("raise", "hang", "exit", "leave", "memory", "nan", "word")
    *failed, parts, right, wrong = judged(environment, *bad, "parts", "7", "8")
    assert [rollout.masked for rollout in failed] == [False, True, True, True, False, False, False]
    assert [rollout.parts for rollout in failed] == [{} if rollout.masked else {FAILED: 1.0} for rollout in failed]
    assert [rollout.reward for rollout in failed] == [0.0] * len(bad)
    reasons = ("KeyError", "more than 2 s", "has ended", "SystemExit", "MemoryError", "finite", "ValueError")
    assert [reason in (rollout.failure or "") for rollout, reason in zip(failed, reasons, strict=True)] == [True] * 7
    number = environment.prompt(0).metadata["values"]["n"]
    assert (parts.reward, parts.parts) == (0.5, {"exact": 0.0, "short": 1.0, "row": number})
    assert [(rollout.reward, rollout.parts) for rollout in (right, wrong)] == [(1.0, {"exact": 1}), (0.0, {"exact": 0})]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("mine.py:other", "has no function 'other'"),
        ("mine.py:data", "has no function 'data'"),
        ("mine.py", "names no function"),
        ("nowhere.py:reward", "No such file"),
        ("no_such_package.rewards:reward", "No module named 'no_such_package'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_before_the_run(sums, tmp_path, monkeypatch, target, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(REWARD))
    with pytest.raises(ValueError, match=rf"^task\.args\.reward: .*{reason}.*allowed: package\.module:function"):
        sums(reward=target)


def test_a_reward_may_be_a_dotted_path(sums, tmp_path, monkeypatch):
    (tmp_path / "dotted").mkdir()
    (tmp_path / "dotted" / "mine.py").write_text("from .other import HALF\n\ndef reward(**given):\n    return HALF\n")
    (tmp_path / "dotted" / "other.py").write_text("HALF = 0.5\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert judged(sums(reward="dotted.mine:reward"), "7")[0].reward == 0.5


def test_a_reward_may_be_asynchronous_and_keep_what_belongs_to_its_loop(sums, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio\n\nlocks = []\n\n"
        "async def reward(text, answer, **rest):\n"
        "    locks.append(asyncio.get_running_loop())\n"
        "    await asyncio.sleep(0)\n"
        "    return {'reward': float(text == answer), 'loops': len(set(locks))}\n"
    )
    right, wrong = judged(sums(reward=f"{tmp_path}/mine.py:reward", score_processes=1), "7", "8")
    assert [(rollout.reward, rollout.parts["loops"]) for rollout in (right, wrong)] == [(1.0, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("text, answer", "got an unexpected keyword argument 'row'"),
        ("data_source, solution_str, ground_truth, extra_info=None", "missing a required argument: 'data_source'"),
    ],
)
def test_a_reward_with_other_arguments_is_refused_before_the_run(sums, tmp_path, arguments, reason):
    (tmp_path / "mine.py").write_text(f"def reward({arguments}):\n    return 1.0\n")
    with pytest.raises(ValueError, match=rf"^task\.args\.reward: .*with text, answer, row, finish_reason: {reason}"):
        sums(reward=f"{tmp_path}/mine.py:reward")


@pytest.mark.parametrize("before", ["", "\u0130\u0130 ", "\u017f"])  # in lower case some letters are two
def test_what_is_before_an_answers_line_does_not_move_it(before):
    assert find_answer(f"{before}ANSWER: 1\n{before}Answer: **12**\n", "line").answer == "12"
