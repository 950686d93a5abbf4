"""The benchmark of release policies finds a broken promise, and one real pair of runs holds."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from benchmarks.release import LENGTHS, Course, Row, course

COURSE = Course(
    steps_per_s=1.0, steps_per_s_all=1.0, mean_age=2.0, p95_age=2.0, largest_age=16, mean_age_all=5.0, waiting=0.0,
    idle=0.5, charged=136,
)  # fmt: skip
ROW = Row("slow learner", "just_in_time", 1.0, 136, (COURSE, COURSE), (0.99, 1.0), (0.99, 1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"courses": (COURSE, replace(COURSE, charged=137))},
        {"courses": (COURSE, replace(COURSE, largest_age=17))},
        {"courses": (replace(COURSE, mean_age=3.1),) * 2},
        {"ratios": (0.9, 0.96)},
    ],
)
def test_each_promise_and_bar_is_judged(change):
    assert ROW.broken() == []
    assert len(replace(ROW, **change).broken()) == 1


@pytest.mark.slow
def test_tickets_are_held_back_by_the_real_service(tmp_path):
    load = msgspec.structs.replace(LENGTHS, token=0.0005, step=0.3)
    found = {policy: course(tmp_path / policy, policy, load, 8)[1] for policy in ("eager", "just_in_time")}
    assert found["just_in_time"].mean_age < 4 < found["eager"].mean_age
    assert found["just_in_time"].steps_per_s > 0.9 * found["eager"].steps_per_s
