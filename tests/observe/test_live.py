"""A run that goes on, as the console, `streamrl top` and the endpoint see it: files that grow under the eyes."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console as Terminal
from run_parts import Recorded, small_run

from streamrl.cli import main
from streamrl.config import Config
from streamrl.lab import top
from streamrl.observe.events import merge
from streamrl.observe.live import Live, sentence, shares
from streamrl.observe.timeline import Timeline


def growing(folder, seconds: int) -> Recorded:
    """A run of one learner that waits and trains a second each; at `seconds` it still does."""
    run = Recorded(folder)
    run.life("learner-0", 0, 0, None)
    run.life("generator-0", 0, 0, None)
    run.span("generator-0", "group", 0, None, group_id=0)
    for second in range(0, seconds, 2):
        run.span("learner-0", "learner.wait", second, second + 1, step=second)
        run.span("learner-0", "learner.step", second + 1, second + 2, step=second)
        run.row(second // 2 + 1, second + 2, **{"tokens/trained": 50})
    run.write()
    return run


def test_a_glance_is_about_the_last_seconds(tmp_path):
    growing(tmp_path, 40)
    live = Live(tmp_path, window=10)
    live.read(40)
    glance = live.glance(40)
    assert (glance.begin, glance.end) == (30, 40)
    assert glance.doing["learner-0"] == pytest.approx({"wait": 5, "train": 5})
    assert glance.doing["generator-0"] == pytest.approx({"generate": 10})
    assert glance.bottleneck in ("generators", "nobody")
    assert glance.roofline is not None
    assert glance.roofline.now == pytest.approx(25)
    assert glance.roofline.learner == pytest.approx(50)
    assert sentence(glance) == "learner wait 50%, train 50%; generators generate 100%"


def test_what_is_read_in_parts_is_what_is_read_at_once_and_seconds_never_fall(tmp_path):
    """The endpoint's counters: reading every two seconds comes to the same as the whole timeline at the end."""
    small_run(tmp_path / "whole")
    paths = (tmp_path / "whole" / "events").iterdir()
    records = sorted((json.loads(line) for path in paths for line in path.open()), key=lambda record: record["time"])
    folder = tmp_path / "growing"
    (folder / "events").mkdir(parents=True)
    live, former = Live(folder, window=4), {}
    for instant in range(2, 23, 2):
        while records and records[0]["time"] <= instant:
            record = records.pop(0)
            with (folder / "events" / f"{record['role']}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        live.read(instant)
        assert all(live.seconds[key] >= seconds for key, seconds in former.items())
        former = dict(live.seconds)
    whole = Timeline.read(tmp_path / "whole")
    for role, track in whole.tracks.items():
        told = {phase: seconds for (name, phase), seconds in live.seconds.items() if name == role}
        assert told == pytest.approx(track.seconds(0, 20))


def test_the_clock_of_a_run_that_is_over_does_not_go_on(tmp_path):
    run = growing(tmp_path, 40)
    live = Live(tmp_path)
    live.read(100)
    assert live.is_alive
    assert live.glance(100).doing["learner-0"] == pytest.approx({"other": 30})
    merge(run.folder)  # the supervisor's last word; the killed ones did not say theirs
    live = Live(tmp_path)
    live.read(100)
    assert not live.is_alive
    assert live.glance(100).end == 40


def test_of_a_run_that_is_over_everything_is_seen(tmp_path):
    small_run(tmp_path)
    live = Live(tmp_path, math.inf)
    live.read(1000)
    glance = live.glance(1000)
    assert (glance.begin, glance.end) == (12, 19)  # from the end of the first step to that of the last
    assert sum(glance.held_up.values()) == pytest.approx(7)


def test_events_of_note_are_those_that_not_every_run_has(tmp_path):
    small_run(tmp_path)
    live = Live(tmp_path)
    live.read(20)
    assert [record["event"] for record in live.notes] == ["worker.silent"]


def test_what_a_run_does_again_and_again_is_not_of_note(tmp_path):
    run = small_run(tmp_path)
    run.span("generator-0", "evaluate", 3, 9, server="server-0", version="0.0")
    run.span("generator-0", "mismatch", 14, 15, server="server-0", version="1.0")
    run.span("reward-model-0", "reward_model.batch", 9, 10)
    for event in ("mismatch.measured", "evaluated", "devices", "groups.forgotten", "journal.compacted"):
        run.point("replay-0", 16, event)
    run.point("generator-0", 17, "evaluate", phase="end", failed="refused")
    run.write()
    live = Live(tmp_path)
    live.read(20)
    assert {record["event"]: record.get("failed") for record in live.notes} == {
        "worker.silent": None,
        "evaluate": "refused",
    }


def test_nothing_is_known_of_a_folder_without_events(tmp_path):
    live = Live(tmp_path)
    live.read()
    assert not live.is_alive
    assert live.glance().doing == {}
    assert sentence(live.glance()) == "nothing yet"


def test_small_shares_are_left_out():
    assert shares({"wait": 60.0, "forward": 39.0, "save": 1.0}) == "wait 60%, forward 39%"
    assert shares({}) == "start"


def test_top_shows_roles_who_holds_the_run_up_and_how_fast_it_could_be(tmp_path):
    small_run(tmp_path)
    live = Live(tmp_path, math.inf)
    live.read()
    screen = Terminal(record=True, width=140, file=io.StringIO())
    screen.print(top.frame(live, Config.model_validate({"run": {"name": "small"}})))
    text = screen.export_text()
    for words in (
        "streamrl · small · is over · 7 s until",
        "generator-0",
        "generate 57%, wait 29%, pause 14%",
        "held up by",
        "roofline",
        "tokens/s trained; generators infinitely fast",
        "worker.silent  worker generator-9",
    ):
        assert words in text
    assert "█" * top.BAR in text


def test_top_of_a_run_that_is_over_ends_by_itself(tmp_path, capsys):
    small_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {name: small}\n")
    for arguments in (["--once"], ["--every", "0.01"]):
        assert main(["top", str(tmp_path), *arguments]) == 0
        assert "held up by" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "nothing")]) == 2
    assert "no run folder" in capsys.readouterr().err
