"""The probes of a run: whatever their task raises costs probes, and never the run."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.generate import probes
from streamrl.observe.events import EventLog, read_events
from streamrl.tasks import left_out
from streamrl.tasks.built_in.copy import Copy
from streamrl.tasks.built_in.remote import RemoteFailed
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Environment, Prompt, Rollout
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerRaised, ScorerUnready
from streamrl.tasks.left_out import LeftOut, OfTask

CONFIG = Config.model_validate({"generate": {"probes": 2}})
ANSWER = ["caf", "<|im_end|>"]
LONG = "cafcafcaf="


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`answered(inference, task)`: the events of the probes; an exception in place of a task that cannot be loaded."""

    def answered(inference: Any, task: Environment | Exception) -> list[dict[str, Any]]:
        async def hosted(*_: Any) -> Environment:
            if isinstance(task, Exception):
                raise task
            return task

        monkeypatch.setattr(probes, "host_task", hosted)
        events = EventLog(tmp_path / "events.jsonl", "generator-0")
        try:
            asyncio.run(probes.answer_probes(CONFIG, tmp_path, inference, events, "start"))
        finally:
            events.close()
        return [event for event in read_events(events.path) if event["event"] == "probe"]

    return answered


def copying(kind: type[Copy] = Copy) -> Copy:
    return kind(Copy.Arguments(), 1, "probe")


@pytest.mark.parametrize("where", ["fetch", "rollout_group"])
@pytest.mark.parametrize(
    "error",
    [
        NotPlayed("no space"),
        ScorerRaised("OSError: no space", masked=True),
        RemoteFailed("http://localhost:1/prompt: 3 tries: no space"),
        ScorerUnready("no space"),
        TimeoutError("no space"),
        ValueError("an image that cannot be read: no space"),
    ],
)
def test_a_probe_on_which_its_task_fails_is_told_and_the_next_one_is_asked(error, where, scripted, answered, caplog):
    task = copying()
    whole = getattr(task, where)
    calls: list[int] = []

    async def failing(*given: Any) -> Any:
        calls.append(len(calls))
        if calls == [0]:
            raise error
        return await whole(*given)

    setattr(task, where, failing)
    (probe,) = answered(scripted([ANSWER]), task)
    assert (probe["index"], probe["answer"]) == (1, "caf")
    assert "probe 0 at the start was not answered: " in caplog.text
    assert "no space" in caplog.text


@pytest.mark.parametrize("error", [ValueError("task.args.server: nobody answers"), ScorerUnready("nobody answers")])
def test_a_task_that_cannot_be_loaded_costs_the_probes_alone(error, scripted, answered, caplog):
    assert answered(scripted([]), error) == []
    assert "probes at the start were not answered: " in caplog.text
    assert "nobody answers" in caplog.text


def test_a_task_that_cannot_be_closed_costs_nothing(scripted, answered, caplog):
    class Open(Copy):
        async def close(self) -> None:
            raise subprocess.TimeoutExpired("adapter.py", 15.0)

    assert [probe["answer"] for probe in answered(scripted([ANSWER] * 2), copying(Open))] == ["caf", "caf"]
    assert "probes at the start: their task was not closed: TimeoutExpired: " in caplog.text


def test_a_server_that_cannot_be_reached_is_the_workers_matter(scripted, answered):
    class Lost(Copy):
        async def rollout_group(self, *_: Any) -> list[Rollout]:
            raise EngineError("http://s", "/generate", None, "refused")

    with pytest.raises(EngineError, match="refused"):
        answered(scripted([]), copying(Lost))


class OneLong(Copy):
    """Its first prompt is too long."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text=LONG if index == 0 else "caf=", answer="caf")


@pytest.mark.parametrize("cut", [None, "cut_left"])
def test_probes_that_are_too_long_are_left_out_or_cut_as_trained_prompts_are(cut, scripted, answered, tmp_path):
    """Of the trained prompts none was: those of another split were not looked at."""
    found = OfTask(limit=5, looked=4, too_long=0, shortest=0, longest=0, size=4, left_out=(), cut=cut)
    left_out.save(tmp_path, LeftOut(trained={CONFIG.task.shares[0].key: found}))
    inference = scripted([ANSWER, ANSWER])
    shown = [probe["prompt"] for probe in answered(inference, copying(OneLong))]
    assert shown == (["caf=", "caf="] if cut is None else [LONG, "caf="])
    assert [each for _, each in inference.cuts] == ([] if cut is None else [Cut(cut, 5)] * 2)
