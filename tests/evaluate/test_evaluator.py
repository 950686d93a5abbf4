"""The walk over the prompts: known pass rates, answers that are left out, the deadline, the prompts themselves."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.evaluate.evaluator import Walk, evaluate, host_evaluated
from streamrl.evaluate.results import Evaluation, Question
from streamrl.tasks.environment import Completion, Environment, Inference, Prompt, Rollout, Score
from streamrl.tasks.registry import build_task
from tests.evaluate.scripted_policy import V7, ScriptedPolicy

ALPHABET = "abcdefghijklmnop"
CHANCES = {symbol: (place + 0.5) / len(ALPHABET) for place, symbol in enumerate(ALPHABET)}
COPY = {"name": "copy", "args": {"length": 1, "alphabet": ALPHABET, "held_out": 0.5}}


def evaluated(policy: ScriptedPolicy, **settings: Any) -> tuple[Evaluation, dict[str, list[Question]]]:
    config = Config.model_validate({"task": COPY, "evaluate": settings})
    tasks = asyncio.run(host_evaluated(config))
    return asyncio.run(evaluate(config, tasks, policy, V7, label="7.0", step=7))


def test_known_pass_rates_come_out_within_sampling_error() -> None:
    evaluation, questions = evaluated(ScriptedPolicy(CHANCES), samples=512, k=(1, 3))
    found, asked = evaluation.tasks["copy"], questions["copy"]
    chances = [CHANCES[question.expected] for question in asked]
    assert len(asked) == 8
    error = math.sqrt(sum(chance * (1 - chance) / 512 for chance in chances)) / len(chances)
    assert abs(found.figures["pass@1"].value - sum(chances) / len(chances)) < 4 * error
    some = [1 - (1 - chance) ** 3 for chance in chances]
    slope = max(3 * (1 - chance) ** 2 for chance in chances)  # of pass@3 by the chance, which carries the error on
    assert abs(found.figures["pass@3"].value - sum(some) / len(some)) < 4 * slope * error
    assert found.figures["greedy"].value == sum(chance > 0.5 for chance in chances) / len(chances)
    assert 2 <= found.figures["length"].value <= 6  # "x" and the end, "wrong" and the end
    assert (found.prompts, found.answers, found.unanswered) == (8, 8 * 513, 0.0)
    assert evaluation.complete


def test_the_prompts_are_the_held_out_ones_each_once_whatever_the_seed_of_the_run() -> None:
    asked = []
    for seed in (1, 2):
        config = Config.model_validate({"run": {"seed": seed}, "task": COPY, "evaluate": {"prompts": 5}})
        _, questions = asyncio.run(
            evaluate(config, asyncio.run(host_evaluated(config)), ScriptedPolicy(CHANCES), V7, label="7.0", step=7)
        )
        asked.append([question.prompt for question in questions["copy"]])
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 5
    whole = {question.prompt for question in evaluated(ScriptedPolicy(CHANCES))[1]["copy"]}
    trained = build_task(Config.model_validate({"task": COPY}).task, seed=1, split="train")
    assert len(whole) == 8
    assert not whole & {trained.prompt(index).text for index in range(8)}


def test_no_more_prompts_are_answered_at_once_than_configured() -> None:
    policy = ScriptedPolicy(CHANCES)
    evaluated(policy, in_flight=3)
    assert policy.most == 3 * 2  # the sampled and the greedy request of each


def test_what_does_not_come_before_the_deadline_is_left_out_and_counted() -> None:
    evaluation, questions = evaluated(ScriptedPolicy(CHANCES, stuck=ALPHABET[:8]), samples=2, timeout=0.5)
    found = evaluation.tasks["copy"]
    stuck = [question for question in questions["copy"] if question.expected in ALPHABET[:8]]
    assert stuck
    assert all(question.missing == 3 and not question.answers for question in stuck)
    assert found.unanswered == pytest.approx(len(stuck) / 8)
    assert found.figures["pass@1"].prompts == 8 - len(stuck)
    assert found.reasons == ("not finished at the deadline",)


def test_after_the_deadline_no_prompt_is_asked() -> None:
    evaluation, questions = evaluated(ScriptedPolicy(CHANCES, stuck=ALPHABET), in_flight=2, timeout=0.3)
    assert len(questions["copy"]) == 2
    assert not evaluation.complete
    found = evaluation.tasks["copy"]
    assert (found.prompts, found.answers, found.unanswered) == (2, 0, 1.0)
    assert found.reasons[0] == "6 prompts were not asked within evaluate.timeout"
    assert "pass@1" not in evaluation.tasks["copy"].figures


def test_an_answer_of_another_version_is_none_of_the_evaluation() -> None:
    evaluation, questions = evaluated(ScriptedPolicy(CHANCES, others=ALPHABET[:8]), samples=2)
    others = [question for question in questions["copy"] if question.expected in ALPHABET[:8]]
    assert all(question.missing == 3 for question in others)
    assert evaluation.tasks["copy"].reasons == ("tokens of version 8.0, not of 7.0",)


def test_a_server_that_cannot_be_reached_ends_the_evaluation() -> None:
    with pytest.raises(EngineError, match="refused"):
        evaluated(ScriptedPolicy(CHANCES, lost=True))


def test_a_prompt_with_too_few_answers_counts_in_no_larger_k() -> None:
    class Half(ScriptedPolicy):
        """Some answers are lost."""

        def draw(self, symbol: str, greedy: bool) -> Completion:
            self.others = ALPHABET if self.random.random() < 0.3 else ""
            return super().draw(symbol, greedy)

    evaluation, questions = evaluated(Half(CHANCES), samples=4, k=(4,), greedy=False)
    answers = [len(question.answers) for question in questions["copy"]]
    figures = evaluation.tasks["copy"].figures
    assert "greedy" not in figures
    assert set(answers) >= {2, 3, 4}
    assert figures["pass@1"].prompts == sum(count > 0 for count in answers)
    assert figures["pass@4"].prompts == answers.count(4)


def test_several_tasks_are_asked_in_turn_and_counted_apart() -> None:
    config = Config.model_validate(
        {"evaluate": {"tasks": [{**COPY, "label": "one"}, {**COPY, "label": "two"}], "prompts": 4, "in_flight": 1}}
    )
    evaluation, questions = asyncio.run(
        evaluate(config, asyncio.run(host_evaluated(config)), ScriptedPolicy(CHANCES), V7, label="7.0", step=7)
    )
    assert [len(asked) for asked in questions.values()] == [4, 4]
    assert list(evaluation.tasks) == ["one", "two"]


def test_what_the_evaluation_is_asked_for_twice_or_cannot_give_is_refused() -> None:
    with pytest.raises(ValueError, match="k: 9 needs as many answers, samples=8; allowed: 1 to 8"):
        Config.model_validate({"evaluate": {"k": [9]}})
    with pytest.raises(ValueError, match="tasks: 'copy' is there twice"):
        Config.model_validate({"evaluate": {"tasks": [COPY, COPY]}})


def test_pass_at_k_is_told_for_the_powers_of_two_unless_named() -> None:
    assert Config.model_validate({"evaluate": {"samples": 12}}).evaluate.ks == (1, 2, 4, 8)
    assert Config.model_validate({"evaluate": {"samples": 12, "k": [12, 5]}}).evaluate.ks == (1, 5, 12)


class Failing(Environment):
    """Raises on the answers that its prompt lists, by their number."""

    size = 2

    def __init__(self) -> None:
        self.calls = 0

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="a=", answer="a")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        self.calls += 1
        if prompt.index == 0 or self.calls % 4 == 0:
            raise TimeoutError("service") if self.calls % 8 == 4 else KeyError("x")
        return Score(reward=1.0)


def test_an_answer_that_nobody_could_judge_is_left_out_and_one_on_which_the_scorer_raised_is_wrong() -> None:
    settings = Config.model_validate({"evaluate": {"samples": 8, "greedy": False, "in_flight": 1}}).evaluate
    walk = Walk(settings, {"own": Failing()}, {"own": 2}, ScriptedPolicy(CHANCES), V7)
    asyncio.run(walk.run())
    broken, judged = walk.questions["own"]
    assert (broken.answers, broken.missing) == ((), 8)  # it raised on every answer
    assert any("KeyError" in reason for reason in broken.reasons)
    assert judged.missing == 1
    assert [answer.reward for answer in judged.answers].count(0.0) == 1
    assert judged.right == 6


@pytest.mark.parametrize("asked", [{"samples": 4}, {"samples": 1}, {"samples": 1, "greedy": False}])
def test_a_scorer_that_fails_on_every_answer_of_a_prompt_leaves_out_the_greedy_and_a_single_one_too(
    asked: dict[str, Any],
) -> None:
    settings = Config.model_validate({"evaluate": asked}).evaluate
    walk = Walk(settings, {"own": Failing()}, {"own": 1}, ScriptedPolicy(CHANCES), V7)
    asyncio.run(walk.run())
    (question,) = walk.questions["own"]
    assert (question.answers, question.greedy) == ((), None)
    assert question.missing == settings.samples + settings.greedy


class GreedyOnly(Failing):
    """Judges the answer "wrong", and no other."""

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.text != "wrong":
            raise KeyError("x")
        return Score(reward=1.0)


def test_answers_on_which_the_scorer_raised_are_wrong_where_it_judged_the_greedy_one() -> None:
    class Told(ScriptedPolicy):
        def draw(self, symbol: str, greedy: bool) -> Completion:
            return replace(super().draw(symbol, greedy), text="wrong" if greedy else symbol)

    settings = Config.model_validate({"evaluate": {"samples": 2}}).evaluate
    walk = Walk(settings, {"own": GreedyOnly()}, {"own": 1}, Told(CHANCES), V7)
    asyncio.run(walk.run())
    (question,) = walk.questions["own"]
    assert question.greedy is not None
    assert [answer.reward for answer in (*question.answers, question.greedy)] == [0.0, 0.0, 1.0]


class WithoutAPrompt(Failing):
    """One of its prompts cannot be made."""

    def prompt(self, index: int) -> Prompt:
        if index == 1:
            raise KeyError("no row")
        return super().prompt(index)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(reward=1.0)


def test_a_prompt_that_cannot_be_made_is_left_out_and_counted_and_the_others_are_asked() -> None:
    settings = Config.model_validate({"evaluate": {"samples": 2, "greedy": False}}).evaluate
    walk = Walk(settings, {"own": WithoutAPrompt()}, {"own": 3}, ScriptedPolicy(CHANCES), V7)
    asyncio.run(walk.run())
    assert [question.missing for question in walk.questions["own"]] == [0, 2, 0]
    (reason,) = walk.questions["own"][1].reasons
    assert reason.startswith("the prompt was not made: KeyError: 'no row' (")


class Doubling(WithoutAPrompt):
    """It gives twice as many rollouts as it is asked for, and numbers its prompts by itself."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index + 40, text="a=", answer="a")

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        return await super().rollout_group(inference, prompt, 2 * n)


def test_another_number_of_rollouts_is_refused_and_told_by_the_index_that_was_asked_for(caplog) -> None:
    settings = Config.model_validate({"evaluate": {"samples": 2}}).evaluate
    walk = Walk(settings, {"own": Doubling()}, {"own": 1}, ScriptedPolicy(CHANCES), V7)
    asyncio.run(walk.run())
    (question,) = walk.questions["own"]
    assert (question.index, question.answers, question.greedy, question.missing) == (0, (), None, 3)
    assert "ValueError: the task gave 4 rollouts, 2 were asked for" in question.reasons
    assert "prompt 0 was not evaluated: ValueError: the task gave 4 rollouts, 2 were asked for" in caplog.text
    assert "prompt 40" not in caplog.text
