"""Runs that are evaluated while they go on: on the only server, on one of two, and with a crash in the middle."""

from __future__ import annotations

import os
import signal

import pytest

from streamrl import cli
from streamrl.evaluate.files import read_questions, read_summary
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics

STEPS = 8
EVALUATE = ("evaluate.every=3", "evaluate.prompts=12", "evaluate.samples=4")


@pytest.mark.slow
def test_a_run_on_one_server_is_evaluated_every_few_steps_and_ends_as_without(make_run, capsys):
    run = make_run(steps=STEPS)
    code, output = run.start(*EVALUATE).finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/max"] <= 2 for row in rows), "the bound"

    told = {int(row["eval/step"]): row for row in rows if "eval/step" in row}
    evaluated = sorted(told)
    assert len({step // 3 for step in evaluated}) == len(evaluated) == 3, "the first version, and one behind 3 and 6"
    assert evaluated[0] == 0
    for step, row in told.items():
        folder = run.folder / "evaluations" / f"{step}.0"
        summary = read_summary(folder)
        assert summary.complete
        assert summary.metrics().items() <= row.items()
        assert row["eval/copy/unanswered"] == 0, "an answer was of another version, or did not come"
        questions = read_questions(folder, "copy")
        assert [len(question.answers) for question in questions] == [4] * 12
        assert (folder / "index.html").exists()

    assert [each["version"] for each in evaluations(run)] == [f"{step}.0" for step in evaluated]
    waits = [each for each in read_events(event_path(run.folder, "replay")) if each["event"] == "publish.waited"]
    waited = sum(row.get("eval/publish_wait", 0.0) for row in rows)
    assert 0 < waited <= sum(each["seconds"] for each in waits) + 1e-3  # those behind the last step hold nobody

    assert cli.main(["audit", str(run.folder)]) == 0
    assert "every checked promise held" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_goes_on_behind_the_evaluations_that_are_written(make_run):
    run = make_run(steps=4)
    code, output = run.start(*EVALUATE).finish()
    assert code == 0, output
    before = {path.name: (path / "summary.json").stat().st_mtime_ns for path in (run.folder / "evaluations").iterdir()}
    assert "0.0" in before
    code, output = run.start(*EVALUATE, f"run.steps={STEPS}").finish()
    assert code == 0, output
    after = {path.name: (path / "summary.json").stat().st_mtime_ns for path in (run.folder / "evaluations").iterdir()}
    assert before.items() < after.items(), "a former one is as it was, and a new one is there"
    steps = sorted(float(name) for name in after)
    assert len({step // 3 for step in steps}) == len(steps)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_of_an_evaluation_begins_it_again(make_run):
    run = make_run(steps=STEPS)
    run.start("evaluate.every=3", "evaluate.samples=64", "generate.restarts=2")
    run.wait_for(lambda: len(evaluations(run)) == 1)
    assert not (run.folder / "evaluations").exists(), "it was over too soon for this test"
    (pid,) = [each["pid"] for each in of_worker(run) if each["event"] == "process.start"]
    os.kill(pid, signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    begun = [each["version"] for each in evaluations(run)]
    assert begun[:2] == ["0.0", "0.0"]
    assert {path.name for path in (run.folder / "evaluations").iterdir()} == set(begun)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_with_two_servers_no_version_waits_for_an_evaluation(make_run):
    run = make_run(steps=STEPS)
    code, output = run.start("generate.servers=2", "evaluate.every=3", "evaluate.samples=64").finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert all(row["staleness/max"] <= 2 for row in rows), "the bound"
    assert not any("eval/publish_wait" in row for row in rows)
    assert sum("eval/step" in row for row in rows) == len(evaluations(run))
    (first, *_) = evaluations(run)
    end = next(each["time"] for each in of_worker(run) if each["event"] == "evaluate" and each["phase"] == "end")
    during = [
        each for each in of_worker(run) if each["event"] == "publish.apply" and first["time"] < each["time"] < end
    ]
    assert during, "the other server took no weights meanwhile"
    assert first["server"] not in {each["server"] for each in during}, "the pinned one did"


def evaluations(run) -> list[dict]:
    """The evaluations that the worker has begun."""
    return [each for each in of_worker(run) if each["event"] == "evaluate" and each["phase"] == "begin"]


def of_worker(run) -> list[dict]:
    path = event_path(run.folder, "generator")
    return list(read_events(path)) if path.exists() else []
