"""What becomes of answers whose scorer fails, how often that may happen, and what the user is told of it."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from streamrl.config.task import ScoringConfig, TaskConfig
from streamrl.tasks.environment import FAILED, Completion, Environment, Prompt, Rollout, Score
from streamrl.tasks.failures import INFRASTRUCTURE, describe, exceptions_of
from streamrl.tasks.registry import build_task
from streamrl.tasks.scoring import ScorerBroken, Scoring
from streamrl.tasks.user_reward import check_target, prepare


class Outage(Exception):
    """What a task's own service raises when it is away."""


class Judged(Environment):
    """Raises what an answer is called after."""

    lowest_reward = -2.0
    errors: ClassVar = {
        "key": KeyError("x"),
        "timeout": TimeoutError(),
        "gone": ConnectionResetError("gone"),
        "out": Outage(),
    }

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="?")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.text in self.errors:
            raise self.errors[completion.text]
        return Score(reward=1.0)


class WithService(Judged):
    """Says that an outage is nobody's fault, and that a lost connection is the answer's."""

    infrastructure = (Outage, TimeoutError)


def completion(text: str) -> Completion:
    empty = np.empty(0, np.int32)
    logprobs = np.empty(0, np.float32)
    return Completion(text=text, prompt_ids=empty, output_ids=empty, logprobs=logprobs, spans=(), finish_reason="stop")


def rollouts(environment: Environment, *texts: str) -> list[Rollout]:
    return asyncio.run(environment.score_all(environment.prompt(0), [completion(text) for text in texts]))


def test_a_scorer_that_raises_on_an_answer_gives_the_tasks_lowest_reward_and_is_counted():
    right, failed = rollouts(Judged(), "fine", "key")
    assert (right.reward, right.parts, right.failure) == (1.0, {}, None)
    assert (failed.reward, failed.parts, failed.masked) == (-2.0, {FAILED: 1.0}, False)


def test_a_scorer_that_fails_by_infrastructure_masks_its_sample():
    for failed in rollouts(Judged(), "timeout", "gone"):
        assert failed.masked
        assert failed.failure is not None
        assert FAILED not in failed.parts


def test_a_task_declares_which_exception_is_which():
    texts = ("key", "timeout", "gone", "out")
    assert [rollout.masked for rollout in rollouts(Judged(), *texts)] == [False, True, True, False]
    assert [rollout.masked for rollout in rollouts(WithService(), *texts)] == [False, True, False, True]


class OfOne(Judged):
    """By one class, and not a tuple of it."""

    infrastructure = Outage


class OfAList(Judged):
    infrastructure = [Outage]  # noqa: RUF012  # as a user writes it


@pytest.mark.parametrize("kind", [OfOne, OfAList])
def test_a_task_that_runs_inline_may_declare_one_class_or_a_list(kind):
    assert [rollout.masked for rollout in rollouts(kind(), "key", "out")] == [False, True]


def test_a_reward_function_declares_which_exception_is_which(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(
        textwrap.dedent("""
            class Away(Exception): ...

            def reward(text, answer, row, finish_reason):
                raise {"away": Away, "late": TimeoutError}[text]("no reply")

            reward.infrastructure = (Away,)
        """)
    )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(4)))
    args = {"path": str(data), "cache": str(tmp_path), "reward": f"{tmp_path}/rewards.py:reward", "reward_wrong": -0.5}
    task = build_task(TaskConfig(name="jsonl", args=args), seed=1, split="train")

    async def judge() -> list[Rollout]:
        try:
            return await task.score_all(task.prompt(0), [completion(text) for text in ("away", "late", "other")])
        finally:
            await task.close()

    away, late, other = asyncio.run(judge())
    assert [away.masked, late.masked, other.masked] == [True, False, False]
    assert late.reward == other.reward == -0.5  # the lower one of reward_wrong and reward_unparsed
    assert away.failure == f"Away: no reply ({tmp_path}/rewards.py:5)"


@pytest.mark.parametrize(("named", "is_right"), [("[Away]", True), ("Away", True), ("'Away'", False), ("(1,)", False)])
def test_what_a_reward_function_declares_is_checked_before_anything_starts(named, is_right, tmp_path: Path):
    source = "class Away(Exception): ...\n\ndef reward(text, answer, row, finish_reason): raise Away\n"
    (tmp_path / "rewards.py").write_text(f"{source}\nreward.infrastructure = {named}\n")
    target = f"{tmp_path}/rewards.py:reward"
    if is_right:
        check_target(target, 60.0)
        judge = prepare([target])
        assert [kind.__name__ for kind in judge.infrastructure] == ["Away"]
        return
    with pytest.raises(
        ValueError, match=r"reward\.infrastructure: .* is no class of exceptions; allowed: a tuple of such"
    ):
        check_target(target, 60.0)


def test_exceptions_may_be_named_by_one_or_by_several():
    assert exceptions_of(Outage, "Task") == (Outage,)
    assert exceptions_of([Outage, TimeoutError], "Task") == (Outage, TimeoutError)
    with pytest.raises(ValueError, match=r"^Task\.infrastructure: <class 'int'> is no class of exceptions"):
        exceptions_of((Outage, int), "Task")


def test_a_failure_names_the_exception_and_the_line_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("import json\n\n\ndef parse(text):\n    return json.loads(text)['answer']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine  # type: ignore[import-not-found]

    for text, told in (("{", "JSONDecodeError"), ("{}", "KeyError: 'answer'")):
        with pytest.raises((ValueError, KeyError)) as raised:
            mine.parse(text)
        assert describe(raised.value).startswith(told)
        assert describe(raised.value).endswith(" (mine.py:5)")
    assert "(" not in describe(TimeoutError("no time"))  # raised in no code of the user's
    assert "\n" not in describe(ValueError("two\nlines"))


def test_mathematics_that_ends_its_judge_is_the_answers_fault_and_a_judge_that_cannot_start_is_not(tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(4)))
    args = {"path": str(data), "cache": str(tmp_path), "score_timeout": 1e-4}

    async def judge(**more: float) -> Rollout:
        task = build_task(TaskConfig(name="jsonl", args=args | more), seed=1, split="train")
        try:
            (rollout,) = await task.score_all(task.prompt(0), [completion("2")])
        finally:
            await task.close()
        return rollout

    late, unready = asyncio.run(judge(start_timeout=100.0)), asyncio.run(judge(start_timeout=1e-3))
    assert (late.masked, late.parts) == (False, {FAILED: 1.0})
    assert "ScorerLate" in (late.failure or "")
    assert unready.masked
    assert "ScorerUnready" in (unready.failure or "")


def test_a_scorer_that_fails_on_a_share_of_the_last_answers_is_broken_and_the_last_failure_is_told():
    scoring = Scoring(ScoringConfig(window=8, most_failed=0.5))
    scoring.count("sums", ["KeyError: 1"] * 4)  # the window is not full
    scoring.count("copy", [None] * 8)
    scoring.count("sums", [None] * 8)
    scoring.count("sums", ["KeyError: 2"] * 3)
    with pytest.raises(
        ScorerBroken, match=r"^the scorer of sums failed on 4 of its last 8 .* KeyError: 3 \(a\.py:7\)$"
    ):
        scoring.count("sums", ["KeyError: 3 (a.py:7)", None])


def test_above_one_no_number_of_failures_ends_a_run():
    scoring = Scoring(ScoringConfig(window=2, most_failed=1.5))
    scoring.count("sums", ["KeyError"] * 99)


def test_a_failure_at_another_place_in_the_users_code_is_a_new_one():
    scoring = Scoring(ScoringConfig())
    failures = ["KeyError: 1 (a.py:7)", "KeyError: 2 (a.py:7)", "KeyError: 1 (a.py:8)", "ScorerLate: late"]
    assert scoring.new(failures) == [failures[0], failures[2], failures[3]]
    assert scoring.new(failures) == []
    assert TimeoutError in INFRASTRUCTURE
