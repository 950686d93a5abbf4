"""A language model as the judge: what it is asked, how its verdicts are read, and what is not the answer's fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import tiny_model
from streamrl.config.task import TaskShare
from streamrl.generate import openai_policy
from streamrl.tasks import model_judge
from streamrl.tasks.built_in.judged import JudgedArguments
from streamrl.tasks.environment import Completion, Prompt, Rollout
from streamrl.tasks.model_judge import ModelJudge
from streamrl.tasks.registry import build_task
from tests.generate import openai_endpoint
from tests.generate.openai_endpoint import Endpoint


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Whose every answer is "cd=hb"."""
    monkeypatch.setattr(openai_policy, "FIRST_PAUSE", 0.01)
    with openai_endpoint.serving() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    tiny_model.make(folder)
    return folder


def arguments(folder: Path, **others: Any) -> dict[str, Any]:
    return {"task": {"name": "copy"}, "model": str(folder), "question": "{answer}", **others}


def judge(folder: Path, **others: Any) -> list[Rollout]:
    """Of the answers "ab" and "ba" to one prompt of `copy`."""

    async def run() -> list[Rollout]:
        task = build_task(TaskShare(name="judged", args=arguments(folder, **others)), 1, "train")
        try:
            return await task.score_all(
                Prompt(index=0, text="ab=", answer="ab"), [_completion("ab"), _completion("ba")]
            )
        finally:
            await task.close()

    return asyncio.run(run())


def _completion(text: str) -> Completion:
    ids, logprobs = np.zeros(3, np.int32), np.zeros(3, np.float32)
    return Completion(text=text, prompt_ids=ids, output_ids=ids, logprobs=logprobs, spans=(), finish_reason="stop")


def test_the_reward_is_the_weighted_sum_of_the_judges_and_the_tasks(folder, endpoint):
    reading = {"verdict": r"([a-h])$", "scores": {"b": 0.5}, "engine_options": {"url": endpoint.url}}
    right, wrong = judge(folder, weight=0.5, **reading)
    assert (right.reward, wrong.reward) == (0.25 + 0.5, 0.25 + 0.5 * wrong.parts.get("own", 1 / 3))
    assert [each.parts["judge"] for each in (right, wrong)] == [0.5, 0.5]
    assert [each.parts["exact"] for each in (right, wrong)] == [1.0, 0.0]
    asked = [body for body in endpoint.asked if body["max_tokens"] == 512]
    assert sorted(body["prompt"] for body in asked) == [[2, 3, 1], [3, 2, 1]]  # "ab=", "ba=", by the chat template
    assert {body["temperature"] for body in asked} == {0.0}
    judge(folder, verdicts=3, **reading)
    assert (endpoint.asked[-1]["n"], endpoint.asked[-1]["temperature"]) == (3, 1.0)


def test_an_engine_in_the_worker_judges_too(folder):
    reading = {"verdict": "(.|$)", "scores": dict.fromkeys(["", *"abcdefgh="], 1.0)}
    first, second = judge(folder, engine="transformers", max_new_tokens=4, **reading)
    assert first.parts["judge"] == second.parts["judge"] == 1.0


@pytest.mark.parametrize("fault", ["no verdict", "an endpoint that is lost", "no log-probs", "no answer"])
def test_an_answer_that_no_verdict_comes_of_is_masked_and_says_why(folder, endpoint, fault, monkeypatch):
    options = {"url": endpoint.url, "retries": 0}
    reading = {"verdict": r"([a-h])$", "scores": {"b": 0.5}}
    if fault == "no verdict":
        reading["verdict"] = "(x)"
    elif fault == "no log-probs":
        endpoint.change = openai_endpoint.without_logprobs
    elif fault == "no answer":
        monkeypatch.setattr(endpoint, "failures", [503] * 9)
    else:
        options["url"] = "http://127.0.0.1:1/v1"
    rollouts = judge(folder, engine_options=options, **reading)
    told = {"no verdict": "no verdict in 'cd=hb'", "no log-probs": "(sglang): its answers have no log-probs",
            "no answer": "status 503", "an endpoint that is lost": "no answer: ClientConnectorError"}  # fmt: skip
    for rollout in rollouts:
        assert rollout.masked
        assert (rollout.failure or "").startswith("ScorerUnready: judge: ")
        assert told[fault] in (rollout.failure or "")


@pytest.mark.parametrize(
    ("text", "score"),
    [("Verdict: 7", 0.7), ("Verdict: 2\nno, **verdict:** 10", 1.0), ("Verdict: 11", None), ("seven", None), ("", None)],
)
def test_the_last_verdict_within_the_range_counts(folder, text, score):
    assert _judge(folder).read(text) == score


def test_the_question_has_the_texts_in_their_places_and_no_place_of_an_answer_counts(folder):
    judge = _judge(folder, question="{prompt}|{answer}|{expected}")
    prompt = Prompt(index=0, messages=({"role": "user", "content": "2+2?"},), answer="4")
    assert judge.question(prompt, "{expected}") == "user: 2+2?|{expected}|4"


def _judge(folder: Path, **others: Any) -> ModelJudge:
    given = arguments(folder, engine_options={"url": "http://a/v1"}, **others)
    return ModelJudge(JudgedArguments.model_validate(given))


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"engine": "sglang"}, "task.args.engine: sglang is what a run trains with; allowed: openai, transformers, or"),
        ({"engine": "opnai"}, "task.args.engine: opnai is not allowed"),
        ({"engine_options": {}}, "task.args.engine_options.url: nothing is not allowed"),
        ({"model": "nowhere"}, "task.args.model: nowhere has no tokenizer.json"),
        ({"scores": {"Yes": 1.0}}, "task.args.scores: 'Yes' is compared in lower case and never found; allowed: 'yes'"),
        ({"question": "good?"}, "task.args.question: 'good?' has no place for the answer"),
        ({"verdict": "yes"}, "task.args.verdict: 'yes' has 0 groups; allowed: one"),
        ({"task": {"name": "lookup"}}, "task.args.task.name: lookup has turns of its own"),
    ],
)
def test_what_cannot_judge_is_refused_in_one_line(folder, others, line):
    share = TaskShare(name="judged", args=arguments(folder, engine_options={"url": "http://a/v1"}) | others)
    with pytest.raises(ValueError, match=r"task\.args") as refused:
        build_task(share, 1, "train")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_judge_that_is_away_is_asked_again_after_a_while(folder, endpoint, monkeypatch):
    async def run() -> list[str]:
        judge = ModelJudge(JudgedArguments.model_validate(arguments(folder, engine_options={"url": endpoint.url})))
        found = []
        endpoint.key = "secret"
        for again in (model_judge.AGAIN, 0.0):
            monkeypatch.setattr(model_judge, "AGAIN", again)
            try:
                await judge.score(Prompt(index=0, text="ab="), "ab")
            except Exception as error:
                found.append(str(error))
            endpoint.key = None
        await judge.close()
        return found

    first, second = asyncio.run(run())
    assert "asks for an API key" in first
    assert "no verdict" in second
