"""The whole loop on real parts: what a run leaves in its folder, that its guarantees hold, and where its time goes."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.observe.roofline import held_up, roofline
from streamrl.observe.timeline import Timeline
from streamrl.observe.trace import trace
from streamrl.replay.journal import recorded_batches
from streamrl.replay.records import Completed, Consumed
from streamrl.stream.codec import decode_group, encode_group
from streamrl.types import Group, PolicyVersion
from tests.rewritten_journal import copy_with_journal

DESIGN_KEYS = {
    "step", "version", "time", "reward/mean", "reward/std", "pass_rate", "signal_rate", "tokens/generated",
    "tokens/trained", "tokens/generated_per_s", "tokens/trained_per_s", "staleness/mean", "staleness/p95",
    "staleness/max", "loss/total", "loss/kl", "loss/entropy", "loss/clip_low", "loss/clip_high", "offpolicy/ess",
    "offpolicy/kl", "offpolicy/log_ratio_max", "weights/ess", "weights/masked", "grad_norm", "lr", "length/mean",
    "length/p95", "time/step", "time/wait", "time/forward_backward", "time/optimizer", "time/publish",
    "idle/learner", "idle/generator", "buffer/groups", "buffer/bytes",
}  # fmt: skip


def test_a_finished_run_has_one_row_a_step_with_every_metric(finished_run):
    rows = list(read_metrics(finished_run.folder))
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert row.keys() >= DESIGN_KEYS
        assert row["staleness/max"] <= 2
        assert row["tokens/trained"] > 0
        assert (row["grad_norm"] > 0) == (row["signal_rate"] > 0)  # every group of a step may be all right or all wrong
    assert any(row["grad_norm"] > 0 for row in rows)


def test_generation_goes_on_while_the_learner_trains(finished_run):
    assert max(row["staleness/max"] for row in read_metrics(finished_run.folder)) >= 1


def test_a_finished_run_folder_holds_what_the_design_names(finished_run):
    folder = finished_run.folder
    assert json.loads((folder / "environment.json").read_text())["packages"]["sglang"]
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step_4", "step_8"}
    times = [json.loads(line)["time"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert times == sorted(times)
    assert len(list((folder / "logs").glob("*.log"))) >= 4


def test_no_log_of_a_run_warns_of_what_it_does_without(finished_run):
    logs = list((finished_run.folder / "logs").glob("*.log"))
    assert not [log.name for log in logs if "apex" in log.read_text().lower()]


def test_the_audit_of_a_finished_run_covers_every_trained_token(finished_run, capsys):
    assert cli.main(["audit", str(finished_run.folder)]) == 0
    trained = sum(row["tokens/trained"] for row in read_metrics(finished_run.folder))
    assert f"tokens audited {trained}, tokens trained {trained}" in capsys.readouterr().out


def test_the_audit_fails_when_one_stamp_is_wrong(finished_run, tmp_path, capsys):
    last = list(recorded_batches(finished_run.folder / "journal"))[-1].groups[-1].group_id

    def forge_one_stamp(record, frames):
        if isinstance(record, Completed) and record.group_id == last:
            frames = encode_group(_stamped_one_version_back(decode_group(*frames)), 1 << 28)
        return record, frames

    copy = copy_with_journal(finished_run.folder, tmp_path, forge_one_stamp)
    assert cli.main(["audit", str(copy)]) == 1
    assert "differ from their stamped version" in capsys.readouterr().out


def test_the_audit_fails_when_a_group_is_trained_twice(finished_run, tmp_path, capsys):
    def train_one_twice(record, frames):
        if isinstance(record, Consumed) and record.step == 5:
            record = Consumed(step=5, group_ids=(*record.group_ids[:-1], record.group_ids[0]))
        return record, frames

    copy = copy_with_journal(finished_run.folder, tmp_path, train_one_twice)
    assert cli.main(["audit", str(copy)]) == 1
    assert "step 5 trained group 20 a second time" in capsys.readouterr().out


def test_the_audit_fails_when_a_group_is_trained_before_its_turn(finished_run, tmp_path, capsys):
    def swap_two(record, frames):
        if isinstance(record, Consumed) and record.step == 5:
            first, second, *rest = record.group_ids
            record = Consumed(step=5, group_ids=(second, first, *rest))
        return record, frames

    copy = copy_with_journal(finished_run.folder, tmp_path, swap_two)
    assert cli.main(["audit", str(copy)]) == 1
    assert "group 21 before group 20, which fifo with window 1 does not allow" in capsys.readouterr().out


def test_training_again_from_the_record_gives_the_same_weights_bit_for_bit(finished_run, tmp_path, capsys):
    digests = []
    for name in ("once", "twice"):
        assert cli.main(["retrain", str(finished_run.folder), "--output", str(tmp_path / name)]) == 0
        output = capsys.readouterr().out
        assert "bit for bit" in output
        digests.append(next(line for line in output.splitlines() if "sha256" in line))
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one_given_the_same_groups(resumed_run, tmp_path, capsys):
    _equals_the_uninterrupted_one(resumed_run, tmp_path, capsys)


@pytest.mark.slow
def test_a_run_that_was_ended_by_ctrl_c_and_resumed_equals_the_uninterrupted_one(interrupted_run, tmp_path, capsys):
    _equals_the_uninterrupted_one(interrupted_run(signal.SIGINT), tmp_path, capsys)


def _equals_the_uninterrupted_one(run, folder, capsys):
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
    incarnations = {
        span.version.incarnation
        for batch in recorded_batches(run.folder / "journal")
        for sample in batch.samples
        for span in sample.spans
    }
    assert incarnations == {0, 1}
    retrain = [sys.executable, "-m", "streamrl.cli", "retrain", str(run.folder), "--output", str(folder / "again")]
    again = subprocess.run(retrain, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert "bit for bit" in again.stdout


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


@pytest.mark.slow
def test_between_the_two_lives_of_a_resumed_run_there_is_nothing(resumed_run):
    timeline = Timeline.read(resumed_run.folder)
    phases = timeline.tracks["learner-0"].phases(timeline.begin, timeline.end)
    pairs = list(itertools.pairwise(phases))
    assert min(after.begin - before.end for before, after in pairs) >= 0
    assert [after.name for before, after in pairs if after.begin > before.end + 0.5] == ["start"]


@pytest.mark.slow
def test_staleness_0_is_synchronous_and_two_ranks_train_it(make_run, capsys):
    run = make_run(steps=4)
    code, output = run.start("replay.max_staleness=0", "learner.ranks=2").finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["staleness/max"] for row in rows] == [0] * 4
    assert cli.main(["audit", str(run.folder)]) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_no_group_is_lost_or_trained_twice(make_run):
    run = make_run(steps=60).start()
    run.wait_for(lambda: run.steps() >= 2)
    os.kill(_starts(run.folder / "events" / "generator-0.jsonl")[-1], signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert len(_starts(run.folder / "events" / "generator-0.jsonl")) == 2
    assert cli.main(["audit", str(run.folder)]) == 0
    ids = [group.group_id for batch in recorded_batches(run.folder / "journal") for group in batch.groups]
    assert ids == list(range(60 * 4))


def _starts(events: Path) -> list[int]:
    """The process ids with which a role was started."""
    return [event["pid"] for event in read_events(events) if event["event"] == "process.start"]


@pytest.mark.slow
def test_a_role_that_cannot_start_is_reported_with_the_last_lines_of_its_log(make_run):
    run = make_run()
    code, output = run.start("generate.server_args={no_such_flag: 1}").finish()
    assert code == 1
    assert "generator-0 ended with" in output
    assert "no-such-flag" in output or "no_such_flag" in output


def test_a_run_folder_refuses_a_changed_key_that_would_alter_its_data(finished_run, tmp_path, capsys):
    config = finished_run.command[-1]
    assert cli.main(["train", config, "generate.group_size=8"]) == 2
    assert "generate.group_size: 8 differs from 4" in capsys.readouterr().err


def test_an_interrupt_while_the_roles_start_leaves_nothing_behind(make_run):
    run = make_run().start()
    run.wait_for(lambda: (run.folder / "logs" / "generator-0.log").exists() and run.port > 0)
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    run.assert_nothing_is_left()


def test_train_on_a_finished_run_starts_nothing_and_changes_no_step(finished_run):
    rows = list(read_metrics(finished_run.folder))
    code, output = finished_run.start().finish()
    assert code == 0, output
    assert "all 8 steps are done, nothing is started" in output
    assert list(read_metrics(finished_run.folder)) == rows
    assert len(_starts(finished_run.folder / "events" / "learner-0.jsonl")) == 1


def _stamped_one_version_back(group: Group) -> Group:
    """The group, its first sample stamped with the version before its own."""
    sample = group.samples[0]
    spans = tuple(
        replace(span, version=PolicyVersion(span.version.step - 1, span.version.incarnation)) for span in sample.spans
    )
    return replace(group, samples=(replace(sample, spans=spans), *group.samples[1:]))
