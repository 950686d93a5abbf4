"""Evaluations of a run: which versions are due, what a server that is pinned says and refuses, and what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl import run_folder
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.engine.client import EngineError
from streamrl.evaluate.evaluator import evaluate, host_evaluated
from streamrl.evaluate.files import evaluated_steps, evaluation_folder, read_summary, write
from streamrl.evaluate.in_run import RunEvaluator
from streamrl.generate.pinning import Pinning
from streamrl.observe.events import EventLog, read_events
from streamrl.publish.transport import PublishError
from streamrl.stream.messages import Applied, Evaluated, Message, ServerState
from streamrl.types import PolicyVersion
from tests.evaluate.scripted_policy import V7, ScriptedPolicy

ALPHABET = "abcdefghijklmnop"
CHANCES = dict.fromkeys(ALPHABET, 0.5)
COPY = {"name": "copy", "args": {"length": 1, "alphabet": ALPHABET, "held_out": 0.5}}
V8, V9 = PolicyVersion(8), PolicyVersion(9)
A9, B8 = ServerState(name="a", version=V9), ServerState(name="b", version=V8)


def configured(**evaluation: Any) -> Config:
    settings = {"every": 4, "prompts": 4, "samples": 2, **evaluation}
    return Config.model_validate({"task": COPY, "evaluate": settings, "generate": {"heartbeat": 0.01}})


def run(evaluator: RunEvaluator, version: PolicyVersion, **policy: Any) -> dict[str, float]:
    return asyncio.run(evaluator.run(version, ScriptedPolicy(CHANCES, version=version, **policy)))


def test_the_first_version_is_due_and_then_one_behind_every_multiple(tmp_path: Path) -> None:
    evaluator = RunEvaluator(configured(), tmp_path)
    due = []
    for step in (0, 1, 3, 5, 6, 7, 9, 17, 18, 20):  # a server alone misses versions while it is evaluated
        if evaluator.is_due(PolicyVersion(step)):
            due.append(step)
            run(evaluator, PolicyVersion(step))
    assert due == [0, 5, 9, 17, 20]
    assert evaluated_steps(tmp_path) == due


def test_a_worker_that_starts_again_goes_on_behind_the_evaluations_that_are_written(tmp_path: Path) -> None:
    run(RunEvaluator(configured(), tmp_path), PolicyVersion(5))
    (tmp_path / "evaluations" / ".9.0.77").mkdir()  # what a crash in the middle may leave
    again = RunEvaluator(configured(), tmp_path)
    assert [again.is_due(PolicyVersion(step, incarnation=1)) for step in (0, 5, 7, 8)] == [False, False, False, True]


def test_the_metrics_are_those_of_the_files(tmp_path: Path) -> None:
    metrics = run(RunEvaluator(configured(), tmp_path), V7)
    summary = read_summary(evaluation_folder(tmp_path, "7.0"))
    assert metrics == summary.metrics()
    assert metrics["eval/copy/pass@1"] == summary.tasks["copy"].figures["pass@1"].value
    assert metrics["eval/step"] == 7
    assert metrics.keys() == {
        "eval/step", "eval/seconds",
        *(f"eval/copy/{name}" for name in ("pass@1", "pass@2", "greedy", "reward", "length", "unanswered")),
    }  # fmt: skip


def test_a_lost_server_leaves_the_evaluation_due_and_files_that_cannot_be_written_do_not(tmp_path: Path) -> None:
    evaluator = RunEvaluator(configured(), tmp_path)
    with pytest.raises(EngineError):
        run(evaluator, V7, lost=True)
    assert evaluator.is_due(V8)
    (tmp_path / "evaluations").write_text("in the way")
    assert run(evaluator, V8)["eval/step"] == 8
    assert not evaluator.is_due(V9)


def test_an_evaluation_made_by_hand_is_never_written_over(tmp_path: Path) -> None:
    config = configured()
    found = asyncio.run(
        evaluate(config, asyncio.run(host_evaluated(config)), ScriptedPolicy(CHANCES), V7, label="7.0", step=7)
    )
    evaluator = RunEvaluator(config, tmp_path)
    write(evaluation_folder(tmp_path, "7.0"), *found)
    run(evaluator, V7)
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["7.0", "7.0-2"]


def test_weights_of_another_run_that_are_called_like_a_version_leave_the_version_due(tmp_path: Path) -> None:
    config = configured()
    found = asyncio.run(
        evaluate(config, asyncio.run(host_evaluated(config)), ScriptedPolicy(CHANCES), V7, label="7.0", step=None)
    )
    write(evaluation_folder(tmp_path, "7.0"), *found)
    assert evaluated_steps(tmp_path) == []
    assert RunEvaluator(config, tmp_path).is_due(V7)


class Scripted:
    """An evaluator whose outcomes are given: metrics, or an exception; it waits until `go`."""

    def __init__(self, *outcomes: dict[str, float] | Exception) -> None:
        self.outcomes = list(outcomes)
        self.go = asyncio.Event()
        self.asked: list[PolicyVersion] = []

    def is_due(self, version: PolicyVersion) -> bool:
        return version.step % 2 == 1

    async def run(self, version: PolicyVersion, handles: object) -> dict[str, float]:
        await self.go.wait()
        self.asked.append(version)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        return None


def serving(
    folder: Path, evaluator: Scripted, scenario: Callable[[Pinning, list[Message]], Any], refused: int = 0
) -> list[Message]:
    """What a worker's pinning says while `scenario` goes on; its first `refused` words are not taken."""
    said: list[Message] = []

    async def say(message: Message) -> bool:
        nonlocal refused
        refused -= 1
        if refused < 0:
            said.append(message)
        return refused < 0

    async def everything() -> None:
        events = EventLog(folder / "events.jsonl", "generator-0")
        pinning = Pinning(configured(), folder, lambda *_: evaluator, tokenizer=None, events=events)
        serve = asyncio.create_task(pinning.serve(lambda name: name, lambda: pinning.mark([A9, B8]), say))
        try:
            async with asyncio.timeout(20):
                await scenario(pinning, said)
        finally:
            serve.cancel()
            await pinning.close()
            events.close()

    asyncio.run(everything())
    return said


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_pinned_server_takes_no_weights_until_its_evaluation_is_over(tmp_path: Path) -> None:
    async def scenario(pinning: Pinning, said: list[Message]) -> None:
        assert not pinning.begin("a", V8), "not due"
        assert pinning.begin("a", V9)
        assert not pinning.begin("b", V9), "one at a time"
        with pytest.raises(PublishError, match="a is being evaluated"):
            pinning.check(A9)
        pinning.check(B8)
        again = ServerState(name="a", version=V7)  # it died and was started again
        assert [state.pinned for state in pinning.mark([A9, B8, again])] == [True, False, False]
        evaluator.go.set()
        await until(lambda: len(said) == 2)
        pinning.check(A9)
        assert pinning.begin("b", V9), "the next one"

    evaluator = Scripted({"eval/copy/pass@1": 0.5}, {})
    said = serving(tmp_path, evaluator, scenario)
    assert said[:2] == [
        Evaluated(version=V9, metrics={"eval/copy/pass@1": 0.5}),
        Applied(server="a", version=V9, pinned=False),
    ]


@pytest.mark.parametrize("failure", [EngineError("http://127.0.0.1:1", "/generate", None, "refused"), KeyError("x")])
def test_an_evaluation_that_fails_lets_its_server_go_and_says_why(tmp_path: Path, failure: Exception) -> None:
    async def scenario(pinning: Pinning, said: list[Message]) -> None:
        evaluator.go.set()
        assert pinning.begin("a", V9)
        await until(lambda: len(said) == 1)

    evaluator = Scripted(failure)
    assert serving(tmp_path, evaluator, scenario) == [Applied(server="a", version=V9, pinned=False)]
    (end,) = [record for record in read_events(tmp_path / "events.jsonl") if record.get("phase") == "end"]
    assert (end["event"], end["server"], end["version"]) == ("evaluate", "a", "9.0")
    assert ("refused" if isinstance(failure, EngineError) else "KeyError") in end["failed"]


def test_results_outlast_a_service_that_is_away(tmp_path: Path) -> None:
    async def scenario(pinning: Pinning, said: list[Message]) -> None:
        evaluator.go.set()
        assert pinning.begin("a", V9)
        await until(lambda: len(said) == 2)

    evaluator = Scripted({"eval/seconds": 1.0})
    said = serving(tmp_path, evaluator, scenario, refused=3)
    assert isinstance(said[0], Evaluated)


def test_without_evaluate_every_nothing_is_made_and_nothing_is_due(tmp_path: Path) -> None:
    def make(*_: object) -> Scripted:
        raise AssertionError("made")

    events = EventLog(tmp_path / "events.jsonl", "generator-0")
    pinning = Pinning(configured(every=0), tmp_path, make, tokenizer=None, events=events)
    assert not pinning.begin("a", V9)
    events.close()


def test_tasks_for_evaluation_alone_are_asked_whole_and_held_out_splits_in_part(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f'{{"question": "{number} + 1?", "answer": "{number + 1}"}}\n' for number in range(80)))
    questions = {"name": "jsonl", "args": {"path": str(data), "prompt": "question", "answer": "answer"}}
    large = {"name": "copy", "label": "large", "args": {"length": 2, "alphabet": ALPHABET, "held_out": 0.5}}
    mix = [large, {**questions, "label": "whole", "evaluation_only": True}]

    def counts(**settings: Any) -> dict[str, int]:
        config = Config.model_validate({"task": {"mix": mix}, "evaluate": settings})
        tasks = asyncio.run(host_evaluated(config))
        shares = config.evaluate.shares(config.task)
        return {share.key: config.evaluate.count(share, tasks[share.key].size) for share in shares}

    assert counts() == {"large": 64, "whole": 80}
    assert counts(prompts=70) == {"large": 70, "whole": 70}


def test_an_evaluation_that_does_not_fit_the_run_is_refused_by_one_line() -> None:
    with pytest.raises(ValueError, match=r"evaluate\.worker: 1 is none of the run's 1 generators; allowed: 0 to 0"):
        Config.model_validate({"evaluate": {"every": 5, "worker": 1}})
    with pytest.raises(ValueError, match=r"evaluate\.timeout: two evaluations of 310 s.*run\.silence_timeout=600"):
        Config.model_validate({"evaluate": {"every": 5, "timeout": 300}})
    assert Config.model_validate({"evaluate": {"timeout": 3000}}).evaluate.longest == 0


def test_evaluated_tasks_that_do_not_fit_are_refused_before_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {"every": 1, "tasks": [{"name": "copy", "args": {"lenght": 3}}]}
    tree = {"model": {"path": tmp_path}, "run": {"folder": tmp_path}, "evaluate": settings}
    with pytest.raises(ConfigError, match=r"task\.args\.lenght"):
        run_folder.prepare(Config.model_validate(tree), fresh=False)
    assert not (tmp_path / "run").exists()
