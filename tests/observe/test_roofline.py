"""How fast each side alone would be, and who holds the run up, on runs whose answer can be worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_parts import Recorded, small_run

from streamrl.observe.metrics import read_metrics
from streamrl.observe.roofline import HOLDERS, Roofline, bottlenecks, held_up, holders, production, roofline
from streamrl.observe.timeline import Timeline


def test_a_run_that_alternates_is_as_slow_as_both_sides_together(tmp_path):
    """Strictly synchronous: 4 s of generation, then 1 s of training, 400 tokens each time."""
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 0, 51)
    run.life("generator-0", 0, 0, 51)
    for step in range(10):
        start = 5 * step
        run.span("generator-0", "group", start, start + 4, group_id=step, attempt=0, tokens=400)
        run.span("learner-0", "learner.wait", start, start + 4, step=step)
        run.span("learner-0", "learner.step", start + 4, start + 5, step=step)
        run.row(step + 1, start + 5, **{"tokens/trained": 400, "tokens/generated": 400})
    timeline = Timeline.read(run.write())
    found = roofline(timeline, list(read_metrics(tmp_path)))
    assert found is not None
    assert found.now == pytest.approx(80)
    assert found.generators == pytest.approx(100)
    assert found.learner == pytest.approx(400)
    assert (found.limited_by, found.limit) == ("generators", found.generators)
    assert found.gap == pytest.approx(0.2)
    assert "20% below the limit, set by the generators" in str(found)
    held = held_up(timeline, 0, 50)
    assert held["generators"] == pytest.approx(40)
    assert held["learner"] == pytest.approx(10)


def test_a_pause_costs_its_time_and_what_is_trained_of_a_token_counts(tmp_path):
    """8 s of generation at 100 tokens/s and 2 s of pause in every 10 s; half of the tokens are trained."""
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 0, 101)
    run.life("generator-0", 0, 0, 101)
    run.span("learner-0", "learner.wait", 0, 100, step=0)
    for step in range(10):
        start = 10 * step
        run.span("generator-0", "group", start, start + 10, group_id=step, attempt=0, tokens=800)
        run.span("generator-0", "publish.apply", start + 3, start + 5, server="server-0")
        run.row(step + 1, start + 10, **{"tokens/trained": 400, "tokens/generated": 800})
    found = roofline(Timeline.read(run.write()), list(read_metrics(tmp_path)))
    assert found is not None
    assert found.now == found.generators == pytest.approx(40)
    assert found.unpaused == pytest.approx(50)
    assert found.learner == math.inf
    assert "(50 without their pauses for new weights)" in str(found)


def test_a_group_that_begins_within_a_pause_begins_at_its_end(tmp_path):
    """Two groups at 10 tokens/s: before a pause of 4 s, and from its middle on."""
    run = Recorded(tmp_path)
    run.life("generator-0", 0, 0, 31)
    run.span("generator-0", "group", 0, 10, group_id=0, attempt=0, tokens=100)
    run.span("generator-0", "publish.apply", 10, 14, server="server-0")
    run.span("generator-0", "group", 12, 24, group_id=1, attempt=0, tokens=100)
    made = production(Timeline.read(run.write()).tracks["generator-0"], 0, 30)
    assert made.tokens == pytest.approx(200)
    assert made.unpaused == pytest.approx(10)
    assert made.alone == pytest.approx(200 / 24)


def test_a_worker_alone_is_as_fast_as_it_was_with_the_most_groups_open(tmp_path):
    """One group at 10 tokens/s for 90 s, then ten at once, 100 tokens/s together, for 30 s."""
    run = Recorded(tmp_path)
    run.life("generator-0", 0, 0, 121)
    run.span("generator-0", "group", 0, 90, group_id=0, attempt=0, tokens=900)
    for group_id in range(1, 11):
        run.span("generator-0", "group", 90, 120, group_id=group_id, attempt=0, tokens=300)
    made = production(Timeline.read(run.write()).tracks["generator-0"], 0, 120)
    assert made.tokens == pytest.approx(3900)
    assert made.alone == made.unpaused == pytest.approx(100)


def test_instants_are_attributed_by_who_waits_for_whom(tmp_path):
    timeline = Timeline.read(small_run(tmp_path).folder)
    held = held_up(timeline, 0, 20)
    assert held == pytest.approx(
        {
            "start": 2.0,  # until the generator is ready
            "generators": 8.0,  # 2-8 and 14-16: the learner waits for groups
            "learner": 2.0 + 1.0 + 1.0,  # 10-12 and 18-20: it works, and the generator has no ticket
            "publish": 1.0 + 1.0,  # 12-13: it hands its weights over; 13-14: the server is paused
            "hand-over": 0.0,
            "nobody": 2.0 + 2.0,  # 8-10 and 16-18: both work
        }
    )
    assert (
        bottlenecks(timeline, 0, 20)[:14]
        == ["start"] * 2 + ["generators"] * 6 + ["nobody"] * 2 + ["learner"] * 2 + ["publish"] * 2
    )


def test_when_everybody_waits_the_hand_over_holds_the_run_up_and_a_share_of_the_generators_counts_as_one(tmp_path):
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 0, 10)
    run.span("learner-0", "learner.wait", 0, 4, step=0)
    run.span("learner-0", "learner.step", 4, 10, step=0)
    for index in range(4):
        run.life(f"generator-{index}", 0, 0, 10)
    run.span("generator-3", "group", 4, 10, group_id=1, attempt=0)
    held = held_up(Timeline.read(run.write()), 0, 10)
    assert held["hand-over"] == pytest.approx(4)
    assert held["learner"] == pytest.approx(6 * 3 / 4)
    assert held["nobody"] == pytest.approx(6 / 4)


EVENTS = st.sampled_from(["learner.wait", "learner.step", "learner.offer", "group", "publish.apply"])


@settings(max_examples=50)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)), max_size=15))
def test_every_instant_is_attributed_once(tmp_path_factory, spans):
    run = Recorded(tmp_path_factory.mktemp("run"))
    for role in ("learner-0", "generator-0", "generator-1"):
        run.life(role, 0, 1, 50)
    for event, index, begin, seconds in spans:
        role = "learner-0" if event.startswith("learner") else f"generator-{index % 2}"
        run.span(role, event, begin, begin + seconds, server="server-0", group_id=1)
    timeline = Timeline.read(run.write())
    place = 0.0
    for begin, end, shares in holders(timeline, 0, 50):
        assert begin == place
        assert end > begin
        assert sum(shares.values()) == pytest.approx(1)
        assert all(-1e-12 <= share <= 1 and holder in HOLDERS for holder, share in shares.items())
        place = end
    assert place == 50
    assert sum(held_up(timeline, 0, 50).values()) == pytest.approx(50)


def test_without_two_steps_there_is_no_roofline(tmp_path):
    timeline = Timeline.read(small_run(tmp_path).folder)
    rows = list(read_metrics(tmp_path))
    assert roofline(timeline, rows[:1]) is None
    assert roofline(timeline, []) is None
    assert roofline(Timeline(), rows) is None
    assert Roofline(1, 0, math.inf, math.inf).gap == 0.0
