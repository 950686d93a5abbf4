"""Runs whose task is the user's own, and misbehaves: what the run does, and what its user is told."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.lab.report.curves import panels
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from tests.operations_table import GOES_ON, documented

TASK = """
    import itertools, os, time

    from streamrl.tasks.environment import Environment, Prompt, Score


    class Task(Environment):
        lowest_reward = -1.0

        def __init__(self, arguments, seed, split):
            self.calls = itertools.count()

        def prompt(self, index):
            return Prompt(index=index, text="abcdefgh"[index % 8] + "=", answer="a")


    class Always(Task):
        async def score(self, prompt, completion):
            return Score(reward={}[prompt.answer])


    class Sometimes(Task):
        async def score(self, prompt, completion):
            if next(self.calls) % 4 == 1:
                raise ValueError("not like this")
            return Score(reward=len(completion.output_ids) / 8)


    class Blocks(Task):
        def __init__(self, arguments, seed, split):
            super().__init__(arguments, seed, split)
            with open(f"{__file__}.starts", "a") as starts:  # each process that takes another's place has another end
                starts.write("x")
                self.kind = starts.tell() % 3

        async def score(self, prompt, completion):
            if next(self.calls) == 11:
                match self.kind:
                    case 0: time.sleep(1e9)
                    case 1: os._exit(1)
                    case 2:
                        while True: pass
            return Score(reward=len(completion.output_ids) / 8)
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[[str], str]:
    """`task(CLASS)`: the override that names a class of TASK."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    return lambda name: f"task.name={tmp_path}/mine.py:{name}"


def line_of(task: str, text: str) -> int:
    """The line of the user's file that has `text`."""
    path = Path(task.removeprefix("task.name=").rpartition(":")[0])
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_the_run_with_the_users_own_exception_and_line(
    make_run: Callable[..., Any], task: Callable[[str], str]
) -> None:
    always = task("Always")
    run = make_run().start(always, "task.scoring.window=32")
    code, output = run.finish()
    assert code == 1, output
    last = output.strip().splitlines()[-1]
    documented("the scorer of ... failed on ... of its last ... answers ...", last, code)
    assert "the scorer of Always failed on 32 of its last 32 answers" in last
    assert last.endswith(
        f"KeyError: 'a' ({always.removeprefix('task.name=').rpartition(':')[0]}:{line_of(always, '{}[')})"
    )


@pytest.mark.slow
def test_a_reward_that_sometimes_raises_is_counted_in_metrics_console_summary_and_report(
    make_run: Callable[..., Any], task: Callable[[str], str]
) -> None:
    run = make_run().start(task("Sometimes"))
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    failed = sum(row["reward/failed"] for row in rows)
    assert 0 < failed < sum(row["samples/all"] for row in rows) == 8 * 4 * 4
    assert min(row["reward/mean"] for row in rows) < max(row["reward/mean"] for row in rows)
    assert f"the scorer raised on {failed:.0f} of 128 answers" in output  # the summary
    assert output.count("the scorer raised on") >= 2  # and the lines before it
    documented("the scorer raised on ... of ... answers", output, GOES_ON)
    (told,) = [
        event for event in read_events(run.folder / "events/generator-0.jsonl") if event["event"] == "scorer.failed"
    ]
    assert "ValueError: not like this" in told["reason"]
    curves = {name: {"y": [row.get(name) for row in rows]} for name in ("reward/failed", "samples/failed")}
    shown = panels([{"curves": {"metrics": curves}}])
    assert [panel["title"] for panel in shown] == ["Answers on which the scorer raised"]


@pytest.mark.slow
def test_a_scorer_that_blocks_or_dies_stops_no_heartbeat_no_deadline_and_no_evaluation(
    make_run: Callable[..., Any], task: Callable[[str], str]
) -> None:
    scoring = ("task.scoring.timeout=2", "task.scoring.processes=1")
    lease = ("replay.lease=8", "generate.heartbeat=0.5")  # a worker that is blocked for 1e9 seconds loses its tickets
    run = make_run().start(task("Blocks"), *scoring, *lease, "evaluate.every=4", "evaluate.prompts=4")
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert len(rows) == 8
    assert sum(row.get("samples/failed_scorer", 0) for row in rows) > 0
    assert sum(row["samples/failed"] for row in rows) == sum(row.get("samples/failed_scorer", 0) for row in rows) < 64
    events = [event for path in (run.folder / "events").glob("*.jsonl") for event in read_events(path)]
    named = [event["event"] for event in events]
    assert not {"worker.silent", "ticket.expired"} & set(named)
    told = {event["reason"].partition(":")[0] for event in events if event["event"] == "scorer.failed"}
    assert told == {"ScorerLate", "ScorerLost"}
    assert any(row.get("eval/step") is not None for row in rows)
    assert not [process for process in psutil.process_iter(["cmdline"]) if is_host_of(process, run.folder)]


def is_host_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process hosts a task of this run's worker: it has the worker's log open as its output."""
    if "streamrl.tasks.host_process" not in " ".join(process.info["cmdline"] or ()):
        return False
    try:
        return Path(f"/proc/{process.pid}/fd/2").resolve().is_relative_to(folder)
    except OSError:
        return False
