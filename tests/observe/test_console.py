"""What a terminal and a log show of a run, from files that grow."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console as Terminal
from run_parts import small_run

from streamrl.config import Config
from streamrl.observe import console as console_module
from streamrl.observe.console import Console, fields, one_line, sparkline, who_waits
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.live import Glance
from streamrl.observe.metrics import MetricsWriter
from streamrl.observe.summary import print_summary, probes
from streamrl.observe.tail import Tail
from tests.operations_table import GOES_ON, documented

CONFIG = Config.model_validate(
    {"run": {"name": "trial", "steps": 20}, "publish": {"keep_every": 1}, "journal": {"keep": "all"}}
)


def terminal(interactive: bool) -> Terminal:
    return Terminal(record=True, force_terminal=interactive, width=110, height=40, file=open("/dev/null", "w"))


def row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": min(1.0, step / 10),
        "pass_rate": 0.25,
        "signal_rate": 0.5,
        "tokens/generated": 1000,
        "tokens/trained": 900,
        "tokens/generated_per_s": 4321.0,
        "tokens/trained_per_s": 1234.0,
        "staleness/mean": 1.5,
        "staleness/max": 2,
        "idle/learner": 0.42,
        "idle/generator": 0.0,
        "buffer/groups": 3,
        "buffer/bytes": 2**20,
        "time/step": 0.5,
    }


@pytest.fixture
def writer(tmp_path):
    writer = MetricsWriter(tmp_path)
    yield writer
    writer.close()


def test_the_table_shows_what_is_learned_how_stale_it_is_and_who_waits(tmp_path, writer):
    screen = terminal(interactive=True)
    console = Console(CONFIG, tmp_path, screen)
    for step in range(1, 11):
        writer.write(row(step))
        console.refresh()
    console.close()
    console.close()
    text = screen.export_text()
    for words in (
        "streamrl · trial",
        "10 of 20",
        "▁▂▃▄▅▅▆▇██",
        "generated 4,321/s, trained 1,234/s",
        "mean 1.50, max 2 of 2 allowed",
        "3 groups wait, 24 slots, 1.0 MiB",
        "learner waits for the generators 42% of the time",
    ):
        assert words in text


def test_before_the_first_step_it_is_shown_what_each_role_does(tmp_path, writer, monkeypatch):
    screens = [terminal(interactive=each) for each in (True, False)]
    monkeypatch.setattr(console_module, "Starting", partial(console_module.Starting, now=lambda: 100.0))
    consoles = [Console(CONFIG, tmp_path, screen) for screen in screens]
    EventLog(event_path(tmp_path, "replay"), "replay-0").emit("ready")
    EventLog(event_path(tmp_path, "generator"), "generator-0").emit("starting", what="servers load the model")
    monkeypatch.setattr(console_module, "LINE_EVERY", 0.0)
    monkeypatch.setattr(console_module, "GLANCE_EVERY", 0.0)
    for console in consoles:
        console.refresh()
    line = screens[1].export_text(clear=False)
    assert line == "no step yet; replay-0 ready; generator-0 servers load the model, 0:00; learner-0 imports, 0:00\n"
    writer.write(row(1))
    for console in consoles:
        console.close()
    assert "servers load the model, 0:00" in screens[0].export_text(clear=False)
    assert screens[1].export_text().splitlines()[1].startswith("step 1 of 20")


def test_a_resume_shows_the_start_again_until_it_has_made_a_step(tmp_path, writer):
    for step in range(1, 9):
        writer.write(row(step))
    screen = terminal(interactive=True)
    console = Console(CONFIG, tmp_path, screen)
    writer.truncate_after(5)
    console.refresh()
    screen.export_text()
    console.refresh()
    text = screen.export_text()
    assert "no step yet" in text
    assert "5 of 20" in text
    writer.write(row(6) | {"version": "6.1"})
    console.refresh()
    assert "no step yet" not in screen.export_text()
    console.close()


def test_without_a_terminal_there_is_a_plain_line_now_and_then(tmp_path, writer, monkeypatch):
    screen = terminal(interactive=False)
    console = Console(CONFIG, tmp_path, screen)
    writer.write(row(1))
    console.refresh()
    assert screen.export_text(clear=False) == ""  # its time has not come
    monkeypatch.setattr(console_module, "LINE_EVERY", 0.0)
    console.refresh()
    (line,) = screen.export_text().splitlines()
    assert line.startswith("step 1 of 20")
    assert "reward 0.100" in line
    assert "\x1b" not in line


def test_a_resume_replaces_the_steps_that_it_runs_again(tmp_path, writer):
    for step in range(1, 9):
        writer.write(row(step))
    console = Console(CONFIG, tmp_path, terminal(interactive=True))
    writer.truncate_after(5)
    writer.write(row(6))
    console.refresh()
    assert [row["step"] for row in console._rows] == [1, 2, 3, 4, 5, 6]
    console.close()


def test_a_tail_gives_each_complete_line_once(tmp_path: Path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert list(tail.lines()) == [b"one\n", b"two\n"]
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert list(tail.lines()) == [b"three\n"]
    replacement = tmp_path / "replacement"
    replacement.write_bytes(b"new\n")
    replacement.replace(path)
    assert list(tail.lines()) == [b"new\n"]


def test_a_file_that_is_replaced_while_a_tail_opens_it_is_read_from_the_start(tmp_path: Path, monkeypatch):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    replacement, open_it = tmp_path / "replacement", Path.open
    replacement.write_bytes(b"one, amended\ntwo\n")

    def open_and_replace(self: Path, mode: str) -> object:
        file = open_it(self, mode)
        replacement.replace(path)
        return file

    tail = Tail(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_and_replace)
        assert list(tail.lines()) == [b"one\n", b"two\n"]
    assert list(tail.lines()) == [b"one, amended\n", b"two\n"]


@pytest.mark.parametrize(
    ("learner", "generator", "words"),
    [
        (0.02, 0.05, "nobody waits"),
        (0.4, 0.0, "learner waits for the generators 40% of the time"),
        (0.0, 0.3, "generators wait for the learner 30% of the time"),
        (0.2, 0.3, "learner waits for the generators 20% of the time, generators wait for the learner 30% of the time"),
    ],
)
def test_who_waits_for_whom_is_said_in_words(learner, generator, words):
    assert who_waits(learner, generator) == words


def test_a_sparkline_rises_with_the_values_and_fits():
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 1.0]) == "▁█"
    long = sparkline([step / 1000 for step in range(1000)])
    assert len(long) == 40
    assert list(long) == sorted(long)


def test_the_console_and_the_summary_say_where_the_time_goes(tmp_path):
    small_run(tmp_path)
    screen = terminal(interactive=True)
    console = Console(CONFIG, tmp_path, screen)
    console.close()
    text = screen.export_text()
    assert "learner wait 50%, train 15%, backward 10%" in text
    assert "29 tokens/s trained; generators infinitely fast" in text
    console.summary()
    text = screen.export_text()
    assert "Where the time went" in text
    assert "generate 57%, wait 29%, pause 14%" in text
    assert "held up by" in text
    line = one_line(console._rows, CONFIG, console._glance)
    assert line.endswith("/s by the generators") or line.endswith("/s by the learner")


def test_the_summary_shows_answers_before_and_after_figures_and_what_is_next(tmp_path, writer):
    for step in range(1, 21):
        writer.write(row(step))
    log = EventLog(event_path(tmp_path, "generator"), "generator-0")
    for moment, answer in (("start", "[b]zz"), ("end", "abc")):
        for index in range(3):
            probe = {"prompt": f"p{index}=", "expected": "abc", "answer": answer, "reward": 0.0}
            log.emit("probe", moment=moment, index=index, **probe)
    log.close()
    screen = terminal(interactive=False)
    Console(CONFIG, tmp_path, screen).summary()
    text = screen.export_text()
    for words in (
        "[b]zz",
        "p2=",
        "0.300 at the start, 1.000 at the end",
        "20 in 10 s",
        "20,000 generated (2,000/s), 18,000 trained (1,800/s)",
        "mean 1.50, max 2 learner steps",
    ):
        assert words in text
    assert json.dumps(probes(tmp_path)[0][1]["answer"]) == '"abc"'


def test_the_summary_compares_what_was_dropped_with_what_was_trained(tmp_path, writer):
    selection = {"generated/groups": 12.0, "dropped/groups": 4.0, "trained/groups": 8.0, "placeholders": 1.0}
    means = {"dropped/length": 20.0, "dropped/pass_rate": 1.0, "trained/length": 10.0, "trained/pass_rate": 0.5}
    writer.write(row(1) | {f"selection/{name}": value for name, value in (selection | means).items()})
    writer.write(row(2) | {"selection/generated/groups": 8.0, "selection/dropped/groups": 0.0})
    screen = terminal(interactive=False)
    Console(CONFIG, tmp_path, screen).summary()
    text = " ".join(screen.export_text().split())
    assert "4 of 20 groups; mean length 20, of the trained 10; pass rate 1, of the trained 0.5" in text
    assert "1 groups became placeholders" in text


def test_failed_samples_are_shown_by_reason_on_the_screen_in_the_line_and_in_the_summary(tmp_path, writer):
    failed = {"samples/all": 64, "samples/failed": 5, "samples/failed_too_long": 4, "samples/failed_scorer": 1}
    rows = [row(1) | {"samples/all": 64, "samples/failed": 0}, row(2) | failed | {"reward/failed": 3}]
    for each in rows:
        writer.write(each)
    words = "5 of 128 samples not trained: too_long 4, scorer 1; the scorer raised on 3"
    assert f"failed {words}" in one_line(rows, CONFIG, Glance())
    documented("failed ... of ... samples not trained: ...", one_line(rows, CONFIG, Glance()), GOES_ON)
    screen = terminal(interactive=True)
    console = Console(CONFIG, tmp_path, screen)
    console.refresh()
    console.close()
    assert words in screen.export_text()
    printed = terminal(interactive=False)
    print_summary(CONFIG, tmp_path, printed)
    assert words in printed.export_text()
    assert "failed" not in one_line(rows[:1], CONFIG, Glance())


def test_parts_tasks_cut_answers_and_hints_have_lines_only_where_there_are_any(tmp_path):
    plain = dict(fields([row(1) | {"reward/part/exact": 0.5}], CONFIG, Glance()))
    assert not plain.keys() & {"reward parts", "tasks", "cut", "hint", "learner"}
    used = dict(fields([row(1) | {"learner/tflops": 123.4, "learner/mfu": 0.125}], CONFIG, Glance()))
    assert used["learner"] == "123 TFLOP/s a rank, MFU 12.5%"
    parts = {"reward/part/exact": 0.5} | {f"reward/part/p{index}": 0.25 for index in range(8)}
    tasks = {"task/easy/reward/mean": 1.0, "task/easy/groups": 0.5, "task/hard/reward/mean": 0.125}
    said = dict(fields([row(1) | parts | tasks | {"length/cut": 0.5}], CONFIG, Glance()))
    assert said["reward parts"] == ", ".join(f"p{index} 0.250" for index in range(6)) + ", and 2 more"
    assert said["tasks"] == "easy 1.000, hard 0.125"
    assert said["cut"] == "50% of the answers at the length limit"


@pytest.mark.parametrize("interactive", [True, False])
def test_a_hint_is_printed_once_as_it_begins_and_once_as_it_ends(tmp_path, writer, interactive):
    screen = terminal(interactive)
    console = Console(CONFIG, tmp_path, screen)
    for step in range(1, 41):
        writer.write(row(step) | {"offpolicy/ess": 0.2 if step <= 20 else 1.0})
        console.refresh()
        assert ("hint" in dict(fields(console._rows, CONFIG, console._live.glance()))) == (10 <= step < 26)
    console.close()
    text = screen.export_text()
    assert text.count("hint at step 10: the effective sample size is 0.20; try replay.max_staleness") == 1
    assert text.count("hint over at step 26: the effective sample size is 0.20") == 1
    printed = terminal(interactive=False)
    print_summary(CONFIG, tmp_path, printed)
    text = " ".join(printed.export_text().split())
    assert "Hints ┌" in text
    assert "steps 10 to 26 │" in text
    assert "docs/operations.md#it-does-not-learn" in text


def test_where_a_sink_shows_a_run_is_printed_once_and_in_the_summary(tmp_path):
    log = EventLog(event_path(tmp_path, "learner"), "learner-0")
    log.emit("sink", name="Wandb", where="https://wandb.example/[run]/1")
    screen = terminal(interactive=False)
    console = Console(CONFIG, tmp_path, screen)
    for _ in range(3):
        console.refresh()
    console.close()
    log.close()
    assert screen.export_text().splitlines() == ["wandb: https://wandb.example/[run]/1"]
    console.summary()
    assert "wandb: https://wandb.example/[run]/1" in screen.export_text()


def test_a_notebook_which_asks_for_colour_gets_lines_and_no_screen(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does for its own process
    console = Console(CONFIG, tmp_path)
    console._print_line()
    console.close()
    printed = capsys.readouterr().out
    assert printed.startswith("no step yet")
    assert "\x1b" not in printed
