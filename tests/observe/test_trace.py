"""The exported trace: what a viewer needs of it, and that its arrows lead from a ticket to the step."""

from __future__ import annotations

import csv
import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from run_parts import Recorded, small_run

from streamrl.cli import main
from streamrl.observe import trace

Event = dict[str, Any]


def check(events: list[Event]) -> None:
    """What Perfetto's importer asks of a trace in this format, else it drops slices or arrows."""
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    arrows: dict[str, dict[str, Event]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in "XMCisf"
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    for some in slices.values():
        some.sort(key=lambda event: (event["ts"], event["dur"]))
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(some))
    for ends in arrows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            around = slices[end["pid"], end["tid"]]
            assert any(each["ts"] <= end["ts"] <= each["ts"] + each["dur"] for each in around), end


@pytest.fixture
def events(tmp_path) -> list[Event]:
    return list(trace.trace(small_run(tmp_path).folder))


def names_of(events: list[Event], role: str) -> dict[tuple[int, int], str]:
    number = next(event["pid"] for event in events if event["ph"] == "M" and event["args"] == {"name": role})
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == number
    }


def test_a_viewer_can_take_it(events):
    check(events)


def test_every_process_has_its_track_and_every_phase_its_slice(events):
    assert "state" in names_of(events, "learner-0").values()
    states = [place for place, name in names_of(events, "learner-0").items() if name == "state"]
    phases = [event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in states]
    assert phases == ["start", "wait", "forward", "backward", "optimizer", "publish", "wait", "train", "other"]
    assert {"generator-0", "replay-0", "learner-0", "publisher"} == {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }


def test_groups_that_overlap_are_laid_into_as_many_lanes_as_ran_at_once(events):
    places = names_of(events, "generator-0")
    assert list(places.values()) == ["state", "groups, lane 0", "groups, lane 1", "events"]
    groups = [event for event in events if event["name"].startswith("group ")]
    assert len(groups) == 5
    assert {event["args"]["tokens"] for event in groups} == {100}


def test_arrows_lead_from_the_ticket_to_its_group_to_its_batch_to_its_step(events):
    arrows: dict[str, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["name"], event["id"]][event["ph"]] = event
    kinds = [name for name, _ in arrows]
    assert kinds.count("ticket") == 5
    assert kinds.count("group") == 3  # two were never trained
    assert kinds.count("batch") == 2
    lands = sorted(ends["f"]["ts"] for (name, _), ends in arrows.items() if name == "batch")
    assert lands == [8_000_000, 16_000_000]  # where the learner stops waiting


def test_what_happened_once_is_a_point_and_metrics_are_curves(events):
    assert [event["name"] for event in events if event["ph"] == "i" and event["name"] != "ready"] == ["worker.silent"]
    curves = {event["name"] for event in events if event["ph"] == "C"}
    assert curves == {"groups that wait", "mean reward"}


def test_a_run_of_an_older_log_has_slices_without_arrows(tmp_path):
    run = Recorded(tmp_path)
    run.life("replay-0", 0, 0, 9)
    run.life("generator-0", 0, 0, 9)
    run.span("generator-0", "group", 1, 3, group_id=0, attempt=0, tokens=5)
    run.point("replay-0", 4, "batch", step=0, groups=1, waiting=0, bytes=10)
    run.write()
    events = list(trace.trace(tmp_path))
    check(events)
    assert not [event for event in events if event["ph"] in "sf"]


def test_the_command_writes_one_or_the_other_and_refuses_anything_else(tmp_path, capsys):
    folder = small_run(tmp_path).folder
    (folder / "config.yaml").write_text("run: {name: small}\n")
    assert main(["trace", str(folder)]) == 0
    check(json.loads((folder / "trace.json").read_text())["traceEvents"])
    assert main(["trace", str(folder), "-o", str(folder / "seconds.csv")]) == 0
    with (folder / "seconds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert rows[9] == {
        "second": "9",
        "time": "9.000",
        "generator-0": "generate",
        "learner-0": "backward",
        "publisher": "idle",
        "held_up_by": "nobody",
    }
    assert main(["trace", str(folder), "-o", "run.txt"]) == 2
    assert "--output: run.txt; allowed: a file that ends in .json or .csv" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("run: {name: empty}\n")
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert "no event logs" in capsys.readouterr().err
