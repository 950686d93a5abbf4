"""The event log: complete lines from several threads and processes, spans, and the merge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from streamrl.observe.events import EventLog, event_path, merge, read_events
from streamrl.types import PolicyVersion


def test_an_event_is_on_disk_as_soon_as_it_is_emitted(tmp_path):
    log = EventLog(event_path(tmp_path, "generator", 1), "generator-1")
    log.emit("publish.applied", version=PolicyVersion(3), seconds=0.5)
    record = list(read_events(tmp_path / "events" / "generator-1.jsonl"))[-1]
    assert record["event"] == "publish.applied"
    assert record["role"] == "generator-1"
    assert record["version"] == "3.0"
    log.close()
    log.close()


def test_what_is_said_after_the_end_is_logged_and_no_failure(tmp_path, caplog):
    log = EventLog(tmp_path / "log.jsonl", "learner-0")
    with log.span("publish"):
        log.close()
    assert [record["event"] for record in read_events(log.path)] == ["process.start", "publish", "process.end"]
    assert "came after" in caplog.text


def test_a_span_is_two_records_that_belong_together(tmp_path):
    log = EventLog(tmp_path / "log.jsonl", "learner-0")
    with log.span("group", group_id=7) as fields:
        fields["tokens"] = 96
    with pytest.raises(RuntimeError, match="lost"), log.span("request"):
        raise RuntimeError("lost")
    log.close()
    begin, end, failed_begin, failed_end = list(read_events(log.path))[1:-1]
    assert (begin["phase"], end["phase"]) == ("begin", "end")
    assert begin["span"] == end["span"] != failed_begin["span"]
    assert end["group_id"] == 7
    assert end["tokens"] == 96
    assert end["seconds"] >= 0
    assert "tokens" not in begin
    assert failed_end["error"] == "RuntimeError: lost"


def test_threads_share_a_log_without_mixing_their_lines(tmp_path):
    log = EventLog(tmp_path / "log.jsonl", "learner-0")
    threads = [
        threading.Thread(target=lambda name=name: [log.emit(f"e{name}", text="x" * 500) for _ in range(200)])
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = log.path.read_bytes().splitlines()
    assert len(lines) == 4 * 200 + 2
    assert all(json.loads(line)["role"] == "learner-0" for line in lines)


def test_a_field_may_not_hide_the_records_own(tmp_path):
    log = EventLog(tmp_path / "log.jsonl", "learner-0")
    with pytest.raises(ValueError, match="'role' is the log's own"):
        log.emit("hello", role="generator")
    log.close()


def test_kill_9_loses_no_record_and_a_torn_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "events" / "replay-0.jsonl"
    script = f"""
import os, signal
from pathlib import Path
from streamrl.observe.events import EventLog
log = EventLog(Path({str(path)!r}), "replay-0")
for number in range(100):
    log.emit("group", number=number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [record.get("number") for record in read_events(path)][1:] == list(range(100))
    with path.open("ab") as file:
        file.write(b'{"time": 1, "role": "rep')
    log = EventLog(path, "replay-0")
    log.close()
    assert [record["event"] for record in read_events(path)][-2:] == ["process.start", "process.end"]


def test_the_merge_is_sorted_by_time_and_complete(tmp_path: Path):
    logs = [EventLog(event_path(tmp_path, "generator", index), f"generator-{index}") for index in range(3)]
    for number in range(30):
        logs[number % 3].emit("tick", number=number)
    for log in logs:
        log.close()
    merged = merge(tmp_path)
    assert merge(tmp_path) == merged == tmp_path / "events.jsonl"
    records = list(read_events(merged))
    assert len(records) == 30 + 6
    times = [record["time"] for record in records]
    assert times == sorted(times)
    assert [record["number"] for record in records if record["event"] == "tick"] == list(range(30))
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_the_merge_of_a_long_run_takes_little_memory(tmp_path: Path):
    folder = tmp_path / "events"
    folder.mkdir()
    text = "x" * 500
    for role in ("a", "b"):
        lines = (json.dumps({"time": float(n), "role": role, "event": "e", "text": text}) + "\n" for n in range(20_000))
        (folder / f"{role}.jsonl").write_text("".join(lines))
    tracemalloc.start()
    merge(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20  # of 20 MiB
    assert (tmp_path / "events.jsonl").stat().st_size > 20 << 20


def test_a_full_disk_ends_no_process_that_tells_an_event(tmp_path: Path):
    path = event_path(tmp_path, "replay")
    script = f"""
import resource
from pathlib import Path
from streamrl.observe.events import EventLog
log = EventLog(Path({str(path)!r}), "replay-0")
size = Path({str(path)!r}).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
log.emit("lost"), log.emit("lost too")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.emit("told", lost=log.lost)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(record["event"], record.get("lost")) for record in read_events(path)][1:] == [("told", 2)]
    assert done.stderr.count("records are lost until there is room") == 1
