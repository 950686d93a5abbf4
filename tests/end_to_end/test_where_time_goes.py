"""Where the time of real runs goes: the events that the roles write are all that the timeline, the trace and the
endpoint need."""

from __future__ import annotations

import itertools
import socket
import urllib.request
from collections import Counter

import pytest

from streamrl.observe.metrics import read_metrics
from streamrl.observe.roofline import held_up, roofline
from streamrl.observe.timeline import Timeline
from streamrl.observe.trace import trace


def test_every_second_of_every_role_of_a_run_is_told_and_the_learner_s_step_has_its_parts(finished_run):
    timeline = Timeline.read(finished_run.folder)
    rows = list(read_metrics(finished_run.folder))
    assert set(timeline.tracks) == {"generator-0", "learner-0", "publisher"}
    for track in timeline.tracks.values():
        phases = track.phases(timeline.begin, timeline.end)
        assert all(before.end == pytest.approx(after.begin) for before, after in itertools.pairwise(phases))
        assert phases[0].begin == track.begin
        assert not track.is_alive
    learner = timeline.tracks["learner-0"].seconds(timeline.begin, timeline.end)
    for phase in ("forward", "backward", "optimizer"):
        assert learner[phase] == pytest.approx(sum(row[f"time/{phase}"] for row in rows), rel=0.01)
    assert learner["wait"] == pytest.approx(sum(row["time/wait"] for row in rows), rel=0.05, abs=0.2)
    generator = timeline.tracks["generator-0"].seconds(timeline.begin, timeline.end)
    assert min(generator[phase] for phase in ("start", "generate", "pause")) > 0
    tokens = sum(group.tokens for group in timeline.tracks["generator-0"].groups)
    assert tokens >= sum(row["tokens/generated"] for row in rows) > 0


def test_the_limits_of_a_run_are_above_what_it_does_and_its_time_is_attributed(finished_run):
    timeline = Timeline.read(finished_run.folder)
    rows = list(read_metrics(finished_run.folder))
    limits = roofline(timeline, rows)
    assert limits is not None
    assert limits.learner > limits.now > 0
    assert limits.unpaused >= limits.generators > 0.5 * limits.now  # what lay in the buffer was generated before
    begin, end = rows[0]["time"], rows[-1]["time"]
    assert sum(held_up(timeline, begin, end).values()) == pytest.approx(end - begin)


def test_the_trace_of_a_run_has_an_arrow_for_every_ticket_every_trained_group_and_every_step(finished_run):
    events = list(trace(finished_run.folder))
    arrows = Counter(event["name"] for event in events if event["ph"] == "s")
    assert arrows == Counter(event["name"] for event in events if event["ph"] == "f")
    groups = sum(event["ph"] == "X" and event["name"].startswith("group ") for event in events)
    assert arrows == {"ticket": groups, "group": 8 * 4, "batch": 8}


def test_between_the_two_lives_of_a_resumed_run_there_is_nothing(resumed_run):
    timeline = Timeline.read(resumed_run.folder)
    phases = timeline.tracks["learner-0"].phases(timeline.begin, timeline.end)
    pairs = list(itertools.pairwise(phases))
    assert min(after.begin - before.end for before, after in pairs) >= 0
    assert [after.name for before, after in pairs if after.begin > before.end + 0.5] == ["start"]


@pytest.mark.slow
def test_the_endpoint_of_a_run_serves_while_it_goes_on_and_closes_with_it(make_run):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    run = make_run(steps=40).start(f"observe.prometheus_port={port}")
    run.wait_for(lambda: run.steps() >= 4)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for words in (
        "streamrl_reward_mean ",
        'streamrl_phase_seconds_total{phase="forward",role="learner-0"}',
        'streamrl_roofline_tokens_per_s{of="now"}',
        'streamrl_held_up_share{by="learner"}',
    ):
        assert words in text
    code, output = run.finish()
    assert code == 0, output
    assert "Where the time went" in output
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
