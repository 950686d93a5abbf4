"""metrics.jsonl, its sinks and its picture, written and read back."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter

from streamrl.algo.diagnostics import BUCKETS
from streamrl.config import Config
from streamrl.observe.metrics import METRICS, NAMES, MetricsWriter, describe, is_known, read_metrics
from streamrl.observe.sinks import open_sinks
from streamrl.replay.records import Completed
from streamrl.replay.selection import Audit

DESIGNED = """step version time reward/mean reward/std pass_rate signal_rate tokens/generated tokens/trained
tokens/generated_per_s tokens/trained_per_s staleness/mean staleness/p95 staleness/max loss/total loss/kl loss/entropy
loss/clip_low loss/clip_high offpolicy/ess offpolicy/kl offpolicy/log_ratio_max weights/ess weights/masked grad_norm lr
length/mean length/p95 time/step time/wait time/forward_backward time/optimizer time/publish idle/learner
idle/generator buffer/groups buffer/bytes"""


def row(step: int) -> dict[str, float]:
    return {"step": step, "version": step, "reward/mean": step / 10, "pass_rate": step / 20, "lr": 1e-3}


def test_every_metric_of_the_design_is_in_the_table_once():
    assert set(DESIGNED.split()) <= NAMES
    assert len(NAMES) == len(METRICS)
    assert all(f"`{name}`" in describe() for name in NAMES)


def test_a_row_of_the_table_has_three_cells_whatever_its_meaning_says():
    rows = [line for line in describe().splitlines() if line.startswith("|")]
    assert len(rows) == len(METRICS) + 2
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)


def test_the_table_names_every_staleness_bucket():
    assert all(f"`/{bucket}`" in describe() for bucket in BUCKETS)


@pytest.mark.parametrize("name", ["reward/mean", "offpolicy/ess/s0", "loss/clip_low/s3_4", "weights/ess/s9+"])
def test_the_table_and_its_staleness_buckets_are_known(name):
    assert is_known(name)


def test_the_table_of_other_names_has_names_of_ours():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    table = page.partition("## Names elsewhere")[2].partition("##")[0]
    ours = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in ours for name in re.findall(r"`([^`]+)`", cell)]
    assert 15 <= len(names) <= 25
    assert [name for name in names if not is_known(name)] == []


def test_what_the_replay_service_tells_of_its_selection_is_in_the_table():
    audit = Audit()
    for sums in (audit.generated, audit.dropped, audit.trained):
        sums.add(Completed(group_id=0, attempt=0, size=1, tokens=4, answers=2, pass_rate=0.5))
    assert audit.collect().keys() <= NAMES


@pytest.mark.parametrize("name", ["reward", "reward/mean/x", "offpolicy/ess/s", "ess/s0", "offpolicy/ess/s0/s1"])
def test_other_names_are_refused(name, tmp_path):
    assert not is_known(name)
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="unknown names"):
        writer.write(row(1) | {name: 1.0})
    writer.close()
    assert list(read_metrics(tmp_path)) == []


def test_a_step_is_one_line_that_any_json_reader_takes(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(row(1) | {"grad_norm": math.nan, "staleness/max": np.int32(2), "loss/total": np.float32(0.5)})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.count("\n") == 1
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["grad_norm"] is None
    assert read["staleness/max"] == 2
    assert read["loss/total"] == 0.5
    writer.close()
    writer.close()


def test_a_resume_cuts_the_steps_beyond_and_keeps_the_others_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(tmp_path)
    for step in range(1, 8):
        writer.write(row(step))
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"step": 8, "rew')  # killed in the middle of a row
    assert [read["step"] for read in read_metrics(tmp_path)] == list(range(1, 8))
    resumed = MetricsWriter(tmp_path)
    resumed.truncate_after(4)
    assert path.read_bytes() == b"".join(lines[:4])
    resumed.write(row(5))
    resumed.close()
    assert [read["step"] for read in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_what_an_evaluation_tells_is_in_the_table_by_the_label_of_its_task():
    for name in ("pass@1", "pass@128", "greedy", "reward", "length", "unanswered"):
        assert is_known(f"eval/my.task-2/{name}")
    assert all(is_known(f"eval/{name}") for name in ("step", "seconds", "publish_wait"))
    assert not any(
        is_known(f"eval/{name}") for name in ("copy", "copy/pass", "copy/pass@", "copy/pass@k", "a/b/reward")
    )


def test_parts_of_the_reward_and_tasks_of_a_mix_are_in_the_table_by_their_names():
    assert all(map(is_known, ("reward/part/format", "reward/part/s0", "task/my.task-2/reward/mean", "task/a/groups")))
    assert not any(map(is_known, ("reward/part/", "reward/part/a/b", "task/a", "task/a/length", "task/a/groups/s0")))


def test_what_comes_late_is_added_to_its_row_alone(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(row(step))
    former = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    writer.amend(2, {"eval/copy/pass@1": 0.5, "eval/seconds": math.nan, "of another program": 1.0})
    writer.write(row(3))
    writer.amend(3, {"eval/copy/greedy": 0.25})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(former[0])
    assert list(read_metrics(tmp_path)) == [
        row(1),
        row(2) | {"eval/copy/pass@1": 0.5},
        row(3) | {"eval/copy/greedy": 0.25},
    ]
    writer = MetricsWriter(tmp_path)
    writer.amend(0, {"eval/step": 0.0})  # the version before the first step
    writer.close()
    assert next(read_metrics(tmp_path)) == row(1) | {"eval/step": 0.0}


def test_what_is_added_late_overwrites_nothing_of_its_kind_while_a_row_is_free(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(row(step) | ({"eval/step": 0.0} if step == 2 else {}))
    for step in (2, 2, 3):  # its own row is taken, then the later neighbour too, then all
        writer.amend(step, {"eval/step": 10.0 + step})
    writer.close()
    assert [row.get("eval/step") for row in read_metrics(tmp_path)] == [12.0, 0.0, 13.0]


def test_a_run_without_a_step_has_no_rows(tmp_path):
    assert list(read_metrics(tmp_path)) == []
    MetricsWriter(tmp_path).truncate_after(0)
    assert list(read_metrics(tmp_path)) == []


@pytest.mark.parametrize("files", [8, 9])
def test_tensorboard_is_written_and_a_resume_hides_the_later_steps(tmp_path, monkeypatch, files):
    """Also where both begin in one second, and their files have the numbers 9 and 10 among those of the process."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(files))
    config = Config.model_validate({"observe": {"tensorboard": True}})
    for first, last in ((1, 9), (6, 7)):
        writer = MetricsWriter(tmp_path, open_sinks(config, tmp_path))
        writer.truncate_after(first - 1)
        for step in range(first, last + 1):
            writer.write(row(step))
        writer.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"version", "reward/mean", "pass_rate", "lr"}
    scalars = read.Scalars("reward/mean")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars[-1].value == pytest.approx(0.7)


def test_tensorboard_lacks_the_rows_for_which_the_disk_had_no_room(tmp_path, monkeypatch, caplog):
    full = False
    write = RecordWriter.write

    def written(self, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", written)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of the library's own thread
    writer = MetricsWriter(tmp_path, open_sinks(Config.model_validate({"observe": {"tensorboard": True}}), tmp_path))
    for step in range(1, 7):
        full = step in (3, 4)
        writer.write(row(step))
    writer.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {scalar.step for scalar in read.Scalars("reward/mean")} >= {1, 2, 5, 6}
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [record.message.count("rows are left out") for record in caplog.records] == [1]


def test_without_sinks_nothing_is_opened(tmp_path):
    assert open_sinks(Config(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import logging
import resource
import sys
from pathlib import Path

from streamrl.observe import disk, metrics

logging.basicConfig(level=logging.ERROR)
disk.ROOM_POLL = 0.01
folder, waits = Path(sys.argv[1]), sys.argv[2] == "waits"
writer = metrics.MetricsWriter(folder)
writer.write({"step": 1})
size = writer.path.stat().st_size


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


limit(size + 5)  # room for a part of the next row
writer.write({"step": 2}, (lambda waited: limit(resource.RLIM_INFINITY)) if waits else None)
"""


@pytest.mark.parametrize(("patience", "steps"), [("waits", [1, 2]), ("raises", [1])])
def test_on_a_full_disk_a_row_waits_for_room_and_none_is_torn(patience: str, steps: list[int], tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), patience], timeout=60, capture_output=True, text=True
    )
    assert (done.returncode == 0) == (patience == "waits"), done.stderr
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == steps
    assert done.stderr.count("training waits for room") == (patience == "waits")
    assert ("OSError" in done.stderr) == (patience == "raises")
