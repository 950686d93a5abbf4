"""`streamrl top` of a run that is over, of a run that other hosts write, and of an endpoint alone."""

from __future__ import annotations

import http.server
import io
import json
import socket
import threading

import pytest
from rich.console import Console as Terminal
from run_parts import Recorded, small_run

from streamrl.cli import main
from streamrl.config import Config
from streamrl.lab import top, top_endpoint
from streamrl.observe import scrape as scrape_module
from streamrl.observe.events import merge, now
from streamrl.observe.live import Live
from streamrl.observe.prometheus import Exporter
from streamrl.observe.run_clock import RunClock
from streamrl.observe.scrape import EndpointError, parse, scrape
from tests.operations_table import documented


def shown(renderable) -> str:
    screen = Terminal(record=True, width=160, file=io.StringIO())
    screen.print(renderable)
    return screen.export_text()


def finished(folder, *, code: int = 0, reason: str = "all 2 steps are done") -> Recorded:
    run = small_run(folder)
    run.point("replay-0", 19.9, "replay.stop", reason=reason, code=code)
    run.write()
    (folder / "config.yaml").write_text("run: {name: small, steps: 2}\n")
    return run


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_of_a_run_that_is_over_the_end_the_totals_and_the_last_steps_are_shown(
    tmp_path, capsys, monkeypatch, arguments
):
    finished(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["top", str(tmp_path), *arguments]) == 0
    text = capsys.readouterr().out
    for words in (
        "is over",
        "ended with exit code 0: all 2 steps are done",
        "wait 10 s, train 3 s, backward 2 s",
        "the last steps",
        "0.250",
        "0.500",
    ):
        assert words in text, text
    assert text.count("ended") >= 3  # the run, the learner, the generator


def test_a_role_that_was_killed_and_a_run_without_a_last_word_are_said_to_be(tmp_path):
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 1, None)
    run.life("generator-0", 0, 1, 8)
    run.write()
    live = Live(tmp_path)
    live.read(9)
    assert live.is_alive
    merge(tmp_path)
    live.read(9)
    assert live.is_over
    text = shown(top.frame(live, Config()))
    assert "ended without a last word" in text
    assert "killed" in text


def test_a_run_is_over_when_its_service_and_its_learner_have_ended_whatever_else_was_killed(tmp_path):
    run = Recorded(tmp_path)
    run.life("replay-0", 0, 1, 20)
    run.life("learner-0", 0, 1, 19)
    run.life("generator-0", 0, 1, None)
    run.write()
    live = Live(tmp_path)
    live.read(21)
    assert live.is_over
    run.point("replay-0", 30, "process.start", pid=2)
    run.point("learner-0", 31, "process.start", pid=2)
    run.write()
    live = Live(tmp_path)
    live.read(32)
    assert live.is_alive


def test_a_run_whose_learner_still_loads_is_not_over(tmp_path):
    run = small_run(tmp_path)
    merge(tmp_path)
    for role in ("replay-0", "learner-0"):  # a resume: no role but the service has begun
        run.point(role, 30, "process.start" if role == "replay-0" else "starting", pid=2, what="builds the model")
    run.write()
    live = Live(tmp_path)
    live.read(31)
    assert not live.is_over


@pytest.mark.parametrize("ahead", [-86_400.0, 86_400.0])
def test_a_live_run_whose_hosts_have_another_clock_is_no_dead_one_and_its_window_is_its_own(tmp_path, ahead):
    present = now() + ahead
    run = Recorded(tmp_path)
    run.life("learner-0", present - 40, present - 40, None)
    run.life("generator-0", present - 40, present - 40, None)
    run.span("generator-0", "group", present - 40, None, group_id=0)
    run.span("learner-0", "learner.wait", present - 40, present - 15, step=0)
    run.span("learner-0", "learner.step", present - 15, None, step=0)
    run.point("replay-0", present, "batch", step=0)
    run.write()
    (tmp_path / "environment.json").write_text(json.dumps({"host": "another-host"}))
    live = Live(tmp_path, clock=RunClock.of(tmp_path))
    live.read()
    assert live.is_alive
    glance = live.glance()
    assert glance.end == pytest.approx(present, abs=5)
    assert glance.doing["learner-0"]["train"] == pytest.approx(15, abs=5)
    text = shown(top.frame(live, Config()))
    assert "goes on" in text
    assert "train" in text


def test_a_resumed_run_lives_though_the_file_system_says_that_the_merge_is_from_the_future(tmp_path):
    run = Recorded(tmp_path)
    run.life("learner-0", 0, 1, 10)
    run.write()
    merge(tmp_path)  # its time is of today, the records' of 1970
    live = Live(tmp_path)
    live.read(11)
    assert live.is_over
    run.life("learner-0", 20, 21, None)
    run.write()
    live = Live(tmp_path)
    live.read(22)
    assert live.is_alive


def test_the_clock_of_a_run_here_is_ours_and_of_another_host_what_it_writes():
    ours, theirs = (RunClock(is_ours=each, clock=lambda: 1000.0) for each in (True, False))
    assert (ours.now(), theirs.now()) == (1000.0, 1000.0)
    for clock in (ours, theirs):
        clock.heard(500.0)
        clock.heard(400.0)
    assert (ours.now(), theirs.now()) == (1000.0, 500.0)


def test_the_clock_of_a_run_is_set_back_with_the_processes_that_are_started_again():
    ours, theirs = (RunClock(is_ours=each, clock=lambda: 1000.0) for each in (True, False))
    for clock in (ours, theirs):
        for role in ("learner-0", "replay-0"):
            clock.heard(5000.0, role)
            assert clock.now() == 5000.0
        clock.heard(800.0, "learner-0", begins=True)
        assert clock.now() == 5000.0, "one of them goes on with the former clock"
        clock.heard(800.0, "replay-0", begins=True)
        clock.heard(900.0, "replay-0")
    assert (ours.now(), theirs.now()) == (1000.0, 900.0)


def test_a_run_that_was_resumed_behind_a_clock_that_was_set_back_is_shown_at_its_present(tmp_path):
    present = now()
    former, resumed = Recorded(tmp_path), Recorded(tmp_path / "resumed")
    former.life("learner-0", present + 3600, present + 3601, present + 3700)
    resumed.life("learner-0", present - 40, present - 39, None)
    records = [run.write().joinpath("events", "learner-0.jsonl").read_text() for run in (former, resumed)]
    tmp_path.joinpath("events", "learner-0.jsonl").write_text("".join(records))
    live = Live(tmp_path)
    live.read()
    glance = live.glance()
    assert glance.end == pytest.approx(present, abs=5)
    assert sum(glance.doing["learner-0"].values()) == pytest.approx(30, abs=5)


def test_an_endpoint_is_shown_without_the_folder(tmp_path, capsys):
    run = finished(tmp_path)
    run.row(3, 19.5, **{"reward/mean": 0.75, "offpolicy/ess/s0": 1.0, "eval/copy/greedy": 0.5, "loss/total": 0.125})
    exporter = Exporter(tmp_path, port=0)
    try:
        assert main(["top", "--url", f"http://127.0.0.1:{exporter.port}", "--once"]) == 0
        found = scrape(f"http://127.0.0.1:{exporter.port}/metrics")
    finally:
        exporter.close()
    text = capsys.readouterr().out
    for words in (
        "since its start",
        "learner-0",
        "generator-0",
        "held up by",
        "reward/mean",
        "0.75",
        "eval/greedy (copy)",
    ):
        assert words in text, text
    assert found.row["reward/mean"] == 0.75
    assert found.row["step"] == 3
    assert found.seconds["learner-0"]["wait"] == pytest.approx(10)
    assert set(found.limits) == {"now", "learner", "generators"}


def test_what_was_done_between_two_looks_is_what_the_counters_grew(tmp_path):
    def look(wait: float) -> scrape_module.Scraped:
        return scrape_module.Scraped(seconds={"learner-0": {"wait": wait, "train": 50.0}})

    looks = top_endpoint.Looks()
    looks.add(look(10), 0)
    assert looks.doing() == (None, {"learner-0": {"wait": 10, "train": 50.0}})
    looks.add(look(14), 5)
    assert looks.doing() == (5, {"learner-0": {"wait": 4, "train": 0.0}})
    looks.add(look(40), 60)
    looks.add(look(41), 61)
    assert looks.doing() == (56, {"learner-0": {"wait": 27, "train": 0.0}})
    looks.add(look(2), 62)  # another life of the endpoint
    assert looks.doing()[0] is None


def test_where_nobody_answers_there_is_one_line_and_code_1(capsys, monkeypatch):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # where it does not listen, and nobody else can
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert main(["top", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error == f"streamrl: {url}: nobody answers: [Errno 111] Connection refused\n"
    documented("streamrl: ...: nobody answers: ...", error, 1)
    monkeypatch.setattr(scrape_module, "DEADLINE", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        assert main(["top", "--url", f"http://127.0.0.1:{deaf.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_endpoint_that_falls_silent_ends_the_watch_with_one_line(tmp_path, capsys, monkeypatch):
    finished(tmp_path)
    exporter = Exporter(tmp_path, port=0)
    shut = threading.Thread(target=exporter.close)

    def frame(*_: object) -> str:
        if not shut.ident:
            shut.start()
        return "a frame"

    monkeypatch.setattr(top_endpoint, "frame", frame)
    assert main(["top", "--url", f"http://127.0.0.1:{exporter.port}", "--every", "0.01"]) == 1
    shut.join(10)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the run is over, or out of reach" in error


@pytest.mark.parametrize("text", ["<html>it works</html>", "", "# TYPE other gauge\nother 1\n"])
def test_what_is_no_run_is_said_to_be_none(text):
    with pytest.raises(EndpointError, match="no run"):
        parse(text)


def test_another_web_server_is_no_run(capsys):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert main(["top", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
    thread.join(10)
    server.server_close()
    assert "what answers is no run: 501" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["RUN", "--url", "http://127.0.0.1:1"],
        ["--url", "http://127.0.0.1:1", "--port", "9464"],
        ["--url", "127.0.0.1:9464"],
        ["--url", "file:///etc/passwd"],
        ["--url", "http://host:99999"],
        ["--url", "http://[::1"],
        ["--url", ""],
    ],
)
def test_a_url_that_is_none_is_refused_in_one_line(arguments, capsys):
    assert main(["top", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "allowed: " in error
