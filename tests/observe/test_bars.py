"""What a terminal and a log show of long work, and what both are left with."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import sys
import threading
import time

import pytest

from streamrl.observe import bars
from streamrl.observe.bars import Bar, paced, track, words


class Screen:
    """A real terminal as stderr, and as stdout where asked for."""

    def __init__(self) -> None:
        self._own, other = pty.openpty()
        self.file = os.fdopen(other, "w", buffering=1)
        os.set_blocking(self._own, False)
        self._seen = b""

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._own, 1 << 16):
                self._seen += part
        return self._seen.decode()

    def await_text(self, wanted: str) -> str:
        deadline = time.monotonic() + 10
        while wanted not in self.text():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)
        return self.text()

    def close(self) -> None:
        self.file.close()
        os.close(self._own)


@pytest.fixture
def screen(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(bars, "PATIENCE", 0.0)
    monkeypatch.setattr(bars, "REDRAW", 0.01)
    screen = Screen()
    yield screen
    screen.close()


def bar_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bar"]


def test_a_terminal_gets_a_bar_with_rate_and_time_left_and_is_left_clean(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.file)
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    with Bar("audit", "batches", 8) as bar:
        print("a result")
        bar.advance(2)
        text = screen.await_text("2 of 8 batches")
    assert "audit" in text
    assert "left" in text
    assert "\x1b[9" in text  # colours
    assert screen.text().endswith("\x1b[2K")  # the line of the bar is wiped out
    assert "\x1b[?25" not in screen.text()  # the cursor was never hidden
    assert output.getvalue() == "a result\n"
    assert sys.stderr is screen.file
    assert sys.stdout is output
    assert bar_threads() == []


def test_an_exception_in_the_middle_leaves_the_terminal_clean_and_no_thread(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.file)

    def work() -> None:
        for number in track(range(4), "audit", "batches"):
            if number == 1:
                screen.await_text("1 of 4 batches")
                raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert screen.text().endswith("\x1b[2K")
    assert sys.stderr is screen.file
    assert bar_threads() == []


def test_what_is_printed_and_logged_to_the_same_terminal_is_above_the_bar(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.file)
    monkeypatch.setattr(sys, "stdout", screen.file)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with Bar("sweep", "runs", 2):
            screen.await_text("0 of 2 runs")
            print("[1/2] first: done", "in a long line " * 10)
            logging.getLogger("streamrl").warning("a warning")
            print("to a log", file=sys.stderr)
        lines = screen.text().replace("\r", "\n").splitlines()
        assert handler.stream is screen.file
    finally:
        logging.getLogger().removeHandler(handler)
    for line in (f"[1/2] first: done {'in a long line ' * 10}", "a warning", "to a log"):
        assert any(each.replace("\x1b[2K", "") == line for each in lines), lines
    assert sys.stdout is screen.file


def test_a_run_of_a_sweep_whose_output_goes_to_a_file_while_the_bar_appears_keeps_it_there(
    screen, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", screen.file)
    with Bar("sweep", "runs", 1), (tmp_path / "log").open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            screen.await_text("0 of 1 runs")
            print("out")
            print("err", file=sys.stderr)
        inside = sys.stderr
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    assert inside is not screen.file
    assert sys.stderr is screen.file


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("COLUMNS", "18")])
def test_a_terminal_without_colours_and_a_narrow_one_have_a_bar_of_one_line(screen, monkeypatch, name, value):
    monkeypatch.setattr(sys, "stderr", screen.file)
    monkeypatch.setenv(name, value)
    with Bar("version 3 of 12", "tokens", 8_000_000) as bar:
        bar.advance(2_000_000)
        screen.await_text("ver")
        time.sleep(0.03)
    assert screen.text().count("\n") == 1  # behind the last drawing, before the line is wiped out
    if name == "NO_COLOR":
        assert "\x1b[9" not in screen.text()


def test_a_bar_in_a_bar_shows_nothing_of_its_own(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.file)
    with Bar("outer", "runs", 2), Bar("inner", "steps", 3):
        screen.await_text("0 of 2 runs")
    assert "inner" not in screen.text()


def test_a_log_gets_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(bars, "LINE_EVERY", 0.01)
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Bar("eval", "prompts", 4) as bar:
        bar.reach(1, 5)
        deadline = time.monotonic() + 10
        while "eval: 1 of 5 prompts" not in log.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert "\x1b" not in log.getvalue()
    assert all(line.startswith("eval: ") for line in log.getvalue().splitlines())
    assert capsys.readouterr().out == ""
    assert bar_threads() == []


def test_work_that_is_soon_done_shows_nothing(capsys):
    assert list(track([1, 2, 3], "audit", "batches")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


def test_no_stderr_and_one_that_is_gone_stop_no_work(monkeypatch):
    monkeypatch.setattr(bars, "LINE_EVERY", 0.0001)
    gone = io.StringIO()
    gone.close()
    for stream in (None, gone, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Bar("audit", "batches") as bar:
            bar.advance()
            if stream is not None:
                stream.close()
            time.sleep(0.01)
    assert bar_threads() == []


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (0, None, 0.0, "0 MB, 0:00 so far"),
        (12.5, 100, 5.0, "12.5 of 100 MB, 2.5/s, 0:35 left"),
        (3, 2, 3.0, "3 MB, 1.0/s, 0:03 so far"),  # more than was expected
        (1_000_000, 4_000_000, 1.0, "1,000,000 of 4,000,000 MB, 1,000,000/s, 0:03 left"),
        (1, 3, 4000.0, "1 of 3 MB, 1:06:40 each, 2:13:20 left"),
        (0, 0, 1.0, "0 of 0 MB, 0:01 so far"),
        (0.5, 1.5, 10.0, "0.5 of 1.5 MB, 0.05/s, 0:20 left"),
    ],
)
def test_words_have_the_unit_the_rate_and_the_time_left(done, total, seconds, text):
    assert words(done, total, "MB", seconds) == text


def test_what_was_done_before_takes_no_time_of_now():
    assert words(26, 44, "runs", 40.0, before=26) == "26 of 44 runs, 0:40 so far"
    assert words(27, 44, "runs", 135.0, before=26) == "27 of 44 runs, 2:15 each, 38:15 left"
    with Bar("tune", "runs", 3) as bar:
        bar.found(2)
        assert "0:00 so far" in str(bar)
        bar.advance()
    assert (bar.done, bar.before) == (3, 2)


def test_a_paced_report_says_the_first_and_the_last(monkeypatch):
    told = []
    report = paced(lambda done, total: told.append(done), every=3600)
    for done in range(1, 101):
        report(done, 100)
    assert told == [1, 100]
