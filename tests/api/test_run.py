"""The handle of a run: its states, waiting, stopping and following, with the real supervisor where one is needed."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.api import run as api_run
from streamrl.api.following import Callbacks, Caller, Metrics
from streamrl.api.run import OVER, RUN, SAVED, Event, Run, State
from streamrl.config import Config
from streamrl.config.file import ConfigError


def write(folder, *steps, **more):
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "reward/mean": 0.1 * step, **more}) + "\n")


def test_rows_are_followed_to_the_end_of_the_run_and_a_step_that_is_trained_again_comes_once(tmp_path):
    over = threading.Event()
    metrics = Metrics(tmp_path, over.is_set)
    write(tmp_path, 1, 2)

    def go_on():
        time.sleep(0.1)
        write(tmp_path, 2, 3)
        over.set()

    threading.Thread(target=go_on).start()
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics.latest["step"] == 3


def test_rows_can_be_followed_on_an_event_loop_that_does_other_work_meanwhile(tmp_path):
    over = threading.Event()

    async def follow():
        return [row["step"] async for row in Metrics(tmp_path, over.is_set)]

    async def both():
        following = asyncio.create_task(follow())
        write(tmp_path, 1)
        await asyncio.sleep(0.3)
        write(tmp_path, 2)
        over.set()
        return await following

    assert asyncio.run(both()) == [1, 2]


def test_callbacks_are_called_for_what_is_new_since_the_start(tmp_path):
    write(tmp_path, 1, **{"eval/step": 0})
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    steps, checkpoints, evaluations = [], [], []
    callbacks = Callbacks(lambda row: steps.append(row["step"]), checkpoints.append, evaluations.append)
    caller = Caller(callbacks, tmp_path)
    caller.call()
    assert (steps, checkpoints, evaluations) == ([], [], [])
    write(tmp_path, 2, 3)
    write(tmp_path, 4, **{"eval/step": 2})
    (tmp_path / "checkpoints" / "step_3").mkdir()
    for _ in range(2):
        caller.call()
    assert steps == [2, 3, 4]
    assert checkpoints == [tmp_path / "checkpoints" / "step_3"]
    assert [row["eval/step"] for row in evaluations] == [2]


class Supervised:
    """A supervisor whose run goes on until it is interrupted."""

    exited = failure = None

    def __init__(self, config):
        self.config = config
        self._interrupted = threading.Event()

    def run(self):
        assert self._interrupted.wait(30)
        return SAVED

    def interrupt(self):
        self._interrupted.set()


def test_a_callback_that_calls_sys_exit_stops_the_run(tmp_path, model_folders, monkeypatch):
    @contextmanager
    def launched(config, **more):
        yield Supervised(config)

    monkeypatch.setattr(api_run, "launched", launched)
    config = Config.model_validate({"run": {"folder": tmp_path, "name": "mine"}, "model": {"path": model_folders[0]}})
    run = Run(config, None, Callbacks(on_step=lambda row: sys.exit("enough"))).start()
    for step in range(1, 100):  # those before its callbacks began are none of theirs
        if not run.is_over:
            write(tmp_path / "mine", step)
            time.sleep(0.1)
    with pytest.raises(SystemExit, match="enough"):
        run.wait(30)
    assert run.state is State.INTERRUPTED


class Slow(Supervised):
    """It saves until it is asked a second time."""

    def __init__(self, config):
        super().__init__(config)
        self.asked = []

    def interrupt(self):
        self.asked.append(len(self.asked))
        if len(self.asked) == 2:
            super().interrupt()


def test_a_stop_that_is_asked_for_again_does_not_end_the_run_before_its_checkpoint(
    tmp_path, model_folders, monkeypatch
):
    @contextmanager
    def launched(config, **more):
        yield Slow(config)

    monkeypatch.setattr(api_run, "launched", launched)
    config = Config.model_validate({"run": {"folder": tmp_path, "name": "mine"}, "model": {"path": model_folders[0]}})
    called = []

    def on_step(row):
        called.append(row["step"])
        run.stop()

    run = Run(config, None, Callbacks(on_step=on_step)).start()
    for step in range(1, 100):
        if len(called) < 3:
            write(tmp_path / "mine", step)
            time.sleep(0.1)
    assert (len(called) >= 3, run.state, run._supervisor.asked) == (True, State.STOPPING, [0])
    run.stop(now=True)
    assert run.wait(30).state is State.INTERRUPTED
    assert run._supervisor.asked == [0, 1]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "abc"])
def test_steps_that_cannot_be_are_refused_and_the_run_can_be_resumed_all_the_same(steps, tmp_path, model_folders):
    model = {"path": model_folders[0]}
    run = Run(Config.model_validate({"run": {"folder": tmp_path}, "model": model}), None, Callbacks())
    config, run._state = run.config, State.DONE
    with pytest.raises(ConfigError, match=r"^run\.steps: .* is not allowed .*; allowed: "):
        run.resume(steps)
    assert (run.state, run.config) == (State.DONE, config)


@given(st.lists(st.sampled_from(list(Event))))
def test_a_run_that_is_over_goes_on_by_a_resume_alone(events):
    state = RUN.initial
    for event in events:
        if event not in RUN.possible(state):
            continue
        if state in OVER:
            assert event is Event.RESUME
        state = RUN.next(state, event)
    assert state in State


@pytest.mark.parametrize("over", OVER)
def test_every_end_can_be_reached_from_a_run_that_goes_on(over):
    assert over in {RUN.next(State.RUNNING, event) for event in RUN.possible(State.RUNNING)}
