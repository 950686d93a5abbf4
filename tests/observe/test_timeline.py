"""What each role did at every instant: the phases of a role fill its life, and overlaps are decided by one rule."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_parts import Recorded, small_run

from streamrl.observe.intervals import clip, subtract, total, union
from streamrl.observe.timeline import KINDS, Phase, Timeline, Track, slices

INSTANTS = st.integers(0, 12)
INTERVALS = st.lists(st.tuples(INSTANTS, INSTANTS), max_size=8)


def holds(intervals: list[tuple[float, float]], instant: float) -> bool:
    return any(begin <= instant < end for begin, end in intervals)


@given(INTERVALS, INTERVALS, INSTANTS, INSTANTS)
def test_sets_of_intervals_hold_the_instants_that_their_definition_says(some, others, low, high):
    one, other = union(some), union(others)
    for instant in (step + 0.5 for step in range(-1, 13)):
        assert holds(one, instant) == holds(some, instant)
        assert holds(subtract(one, other), instant) == (holds(some, instant) and not holds(others, instant))
        assert holds(clip(one, low, high), instant) == (holds(some, instant) and low <= instant < high)
    for each in (one, subtract(one, other)):
        assert all(before[1] < after[0] for before, after in itertools.pairwise(each))
        assert total(each) == sum(holds(each, step + 0.5) for step in range(13))


@given(st.floats(0, 10), st.floats(0, 5))
def test_the_seconds_of_an_interval_add_up_to_it(begin, length):
    parts = list(slices(begin, begin + length))
    assert sum(part for _, part in parts) == pytest.approx(length, abs=1e-9)
    assert all(0 < part <= 1 for _, part in parts)


def names(phases: list[Phase]) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.begin, phase.end) for phase in phases]


def test_each_role_is_told_from_its_own_events(tmp_path):
    tracks = Timeline.read(small_run(tmp_path).folder).tracks
    assert names(tracks["learner-0"].phases(0, 20)) == [
        ("start", 0, 1),
        ("wait", 1, 8),
        ("forward", 8, 9),
        ("backward", 9, 11),
        ("optimizer", 11, 12),
        ("publish", 12, 13),
        ("wait", 13, 16),
        ("train", 16, 19),  # the parts of this step were never told
        ("other", 19, 20),
    ]
    assert names(tracks["generator-0"].phases(0, 20)) == [
        ("start", 0, 2),
        ("generate", 2, 10),
        ("wait", 10, 13),
        ("pause", 13, 14),  # while groups are open
        ("generate", 14, 18),
        ("wait", 18, 20),
    ]
    assert names(tracks["publisher"].phases(12, 15)) == [("idle", 12, 13), ("send", 13, 14), ("idle", 14, 15)]
    assert set(tracks) == {"learner-0", "generator-0", "publisher"}


def test_a_learner_that_offers_its_first_weights_before_it_is_ready_publishes(tmp_path):
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 3, 4)
    run.span("learner-0", "learner.offer", 1, 2, version="0.0")
    track = Timeline.read(run.write()).tracks["learner-0"]
    assert names(track.phases(0, 4)) == [("start", 0, 1), ("publish", 1, 2), ("start", 2, 3), ("other", 3, 4)]


def test_what_still_goes_on_goes_on_until_the_end_that_is_asked_for(tmp_path):
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 1, None)
    run.span("learner-0", "learner.wait", 1, None, step=0)
    track = Timeline.read(run.write()).tracks["learner-0"]
    assert names(track.phases(0, 7)) == [("start", 0, 1), ("wait", 1, 7)]
    assert track.is_alive


def test_a_process_that_was_killed_ends_with_its_last_word_and_the_next_one_begins_again(tmp_path):
    run = Recorded(tmp_path)
    run.life("generator-0", 0, 1, None)
    run.span("generator-0", "group", 2, None, group_id=1, attempt=0)
    run.span("generator-0", "group", 3, 5, group_id=2, attempt=0, tokens=9)
    run.life("generator-0", 8, 9, 12)
    track = Timeline.read(run.write()).tracks["generator-0"]
    assert names(track.phases(0, 20)) == [
        ("start", 0, 1),
        ("wait", 1, 2),
        ("generate", 2, 5),
        ("start", 8, 9),
        ("wait", 9, 12),
    ]
    assert [(group.group_id, group.tokens) for group in track.groups] == [(2, 9)]
    assert not track.is_alive


def test_a_worker_is_paused_only_where_all_its_servers_are(tmp_path):
    run = Recorded(tmp_path)
    run.life("generator-0", 0, 0, 20)
    run.span("generator-0", "group", 0, 20, group_id=1, attempt=0)
    run.span("generator-0", "publish.apply", 2, 3, server="server-0")
    run.span("generator-0", "publish.apply", 3, 4, server="server-1")
    run.span("generator-0", "publish.apply", 10, 14, server="server-0")
    run.span("generator-0", "publish.apply", 12, 16, server="server-1")
    track = Timeline.read(run.write()).tracks["generator-0"]
    assert names(track.phases(5, 20)) == [("generate", 5, 12), ("pause", 12, 14), ("generate", 14, 20)]


def test_a_worker_without_groups_that_evaluates_does_that(tmp_path):
    run = Recorded(tmp_path)
    run.life("generator-0", 0, 0, 10)
    run.span("generator-0", "group", 0, 4, group_id=1, attempt=0)
    run.span("generator-0", "evaluate", 2, 8, server="server-0", version="1.0")
    track = Timeline.read(run.write()).tracks["generator-0"]
    assert names(track.phases(0, 10)) == [("generate", 0, 4), ("evaluate", 4, 8), ("wait", 8, 10)]


def test_every_span_that_makes_a_phase_is_one_that_some_role_writes():
    sources = "".join(path.read_text() for path in (Path(__file__).parents[2] / "streamrl").rglob("*.py"))
    written = set(re.findall(r'\.span\(\s*"([\w.]+)"', sources))
    assert {span for kind in KINDS.values() for span in kind.spans} <= written


def test_every_second_has_what_each_role_did_for_most_of_it(tmp_path):
    timeline = Timeline.read(small_run(tmp_path).folder)
    rows = dict(timeline.seconds(0, 20))
    assert len(rows) == 20
    assert rows[9] == {"generator-0": "generate", "learner-0": "backward", "publisher": "idle"}
    assert rows[13] == {"generator-0": "pause", "learner-0": "wait", "publisher": "send"}


SPANS = st.lists(
    st.tuples(
        st.sampled_from(["group", "publish.apply", "evaluate", "ready", "process.start", "process.end"]),
        st.integers(1, 99),
        st.integers(0, 20),
    ),
    max_size=20,
)


@settings(max_examples=100)
@given(SPANS, st.integers(0, 60), st.integers(1, 60))
def test_whatever_was_recorded_the_phases_fill_the_life_of_a_role_without_overlap(spans, begin, length):
    track = Track("generator-0")
    records = []
    for index, (event, time, seconds) in enumerate(spans):
        record = {"time": time, "role": "generator-0", "event": event}
        if event in ("ready", "process.start", "process.end"):
            records.append(record)
        else:
            records.append({**record, "phase": "begin", "span": str(index)})
            records.append({**record, "time": time + seconds, "phase": "end", "span": str(index)})
    for record in [
        {"time": 0, "role": "generator-0", "event": "process.start"},
        *sorted(records, key=lambda r: r["time"]),
    ]:
        track.feed(record)
    phases = track.phases(begin, begin + length)
    assert all(before.end <= after.begin for before, after in itertools.pairwise(phases))
    assert all(phase.seconds > 0 for phase in phases)
    lived = union(clip([*track._alive, *([(track._born, 999)] if track.is_alive else [])], begin, begin + length))
    assert union((phase.begin, phase.end) for phase in phases) == lived


def test_what_is_forgotten_changes_nothing_behind_it(tmp_path: Path):
    timeline = Timeline.read(small_run(tmp_path).folder)
    before = {role: track.phases(11, 20) for role, track in timeline.tracks.items()}
    for track in timeline.tracks.values():
        track.forget(11)
    assert {role: track.phases(11, 20) for role, track in timeline.tracks.items()} == before
    assert [group.group_id for group in timeline.tracks["generator-0"].groups] == [3, 4]
