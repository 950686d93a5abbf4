"""The parts of a learner step: told in order, without gaps, as long as the metrics say."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from learner_parts import make_batch, make_config

from streamrl.device import Device
from streamrl.learner import stopwatch
from streamrl.learner.stopwatch import Stopwatch
from streamrl.observe.events import now


def test_a_step_tells_of_its_parts_in_order_and_without_gaps(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), mini_batches=2))
    assert trainer.phases == []
    began = now()
    metrics = trainer.train_step(make_batch(0))
    ended = now()
    names = [name for name, _, _ in trainer.phases]
    assert names == ["scores", *["forward", "backward", "optimizer"] * 2]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(trainer.phases))
    assert began <= trainer.phases[0][1]
    assert trainer.phases[-1][2] <= ended
    for name in set(names):
        seconds = sum(end - begin for each, begin, end in trainer.phases if each == name)
        assert metrics[f"time/{name}"] == pytest.approx(seconds)
    assert metrics["time/forward"] > 0
    assert metrics["time/backward"] > 0
    assert metrics["time/forward_backward"] == pytest.approx(metrics["time/forward"] + metrics["time/backward"])


def test_a_stopwatch_adds_up_what_ran_under_it_and_begins_at_zero_when_it_is_read(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    watch = Stopwatch(Device("cpu", 0))
    for _ in range(3):
        with watch.running():
            pass
    assert watch.pop() == 3
    assert watch.pop() == 0
