"""The pressure benchmark runs real processes, and finds a broken promise where there is one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from benchmarks.pressure import FREE, Course, Phase, Row, Squeeze, squeeze, straggle
from benchmarks.pressure_roles import Seen
from benchmarks.pressure_run import largest_charge

PHASE = Phase(step_seconds=0.1, groups_per_s=100.0, busy=1.0, held=48)
SQUEEZE = Squeeze(
    slots=48,
    bound=2,
    group_bytes=1000,
    free=PHASE,
    pressed=PHASE,
    charged=48,
    staleness=2,
    mark_seconds=1.0,
    end_seconds=2.0,
    resident_mark={"service": 50_000_000},
    resident_end={"service": 51_000_000},
)
COURSE = Course(
    steps_per_s=1.0, waiting=0.0, staleness=2, mean_staleness=1.0, slow_trained=1.0, placeholders=0, charged=24
)


def test_slots_are_counted_until_a_server_has_the_weights_of_their_groups():
    tickets = [Seen(clock=float(group_id), group_id=group_id) for group_id in range(12)]
    assert largest_charge(tickets, groups_per_step=4) == 12
    assert largest_charge([*tickets, Seen(clock=7.5, step=1)], groups_per_step=4) == 8
    assert largest_charge([Seen(clock=11.5, step=1), *tickets], groups_per_step=4) == 12


@pytest.mark.parametrize(
    "change",
    [
        {"charged": 49},
        {"pressed": replace(PHASE, held=49)},
        {"staleness": 3},
        {"resident_end": {"service": 56_000_000}},
    ],
)
def test_a_slow_learner_that_breaks_a_promise_is_told(change):
    assert SQUEEZE.broken() == []
    assert len(replace(SQUEEZE, **change).broken()) == 1


@pytest.mark.parametrize("change", [{"charged": 25}, {"staleness": 3}])
def test_one_repeat_beyond_a_bound_breaks_the_row(change):
    row = Row(name="fifo", order="fifo", window=1, slots=24, bound=2, courses=(COURSE, COURSE), ratios=(1.0, 1.0))
    assert row.broken() == []
    assert len(replace(row, courses=(COURSE, replace(COURSE, **change))).broken()) == 1


@pytest.mark.slow
def test_generators_stop_at_the_slots_of_a_slow_learner(tmp_path):
    load = msgspec.structs.replace(FREE, pressed_after=2.0, pressed_step=0.3)
    found = squeeze(tmp_path / "run", seconds=5.0, mark=3.0, load=load)
    assert found.charged == found.slots == 48
    assert found.staleness == found.bound == 2
    assert found.pressed.busy < found.free.busy


@pytest.mark.slow
def test_a_straggler_in_a_window_is_trained_within_the_bound(tmp_path):
    config, course = straggle(tmp_path / "run", {"order": "windowed", "window": 33, "max_staleness": 6}, steps=16)
    assert course.charged == config.replay.slots == 24
    assert course.staleness <= 6
    assert course.slow_trained > 0
