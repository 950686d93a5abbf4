"""A group that fails in the hands of a rank, in a whole run: it is found, left out, counted, and the run completes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches

DEADLINE = 200.0  # seconds
BAD = 17  # of step 4, the first one behind a checkpoint: the learner dies twice without a step between
FAULT = f"""
import sys

if sys.orig_argv[-1] and "learner" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    from streamrl.learner.rows import RowMaker

    make = RowMaker.make

    def fails(self, micro, longest):
        if any(group_id == {BAD} for group_id, _ in micro.groups):
            raise IndexError("index out of range in self")
        return make(self, micro, longest)

    RowMaker.make = fails
"""


@pytest.mark.slow
def test_the_group_that_kills_the_ranks_is_left_out_and_the_run_completes(make_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = make_run(steps=7)
    code, output = run.start("learner.ranks=2", "run.restarts=4").finish()
    assert code == 0, output
    monkeypatch.undo()
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["quarantined"] for row in rows] == [0, 0, 0, 0, 1, 0, 0]
    (found,) = [
        e for e in read_events(run.folder / "events" / "learner-0.jsonl") if e["event"] == "learner.quarantined"
    ]
    assert (found["group_id"], found["reason"]) == (BAD, "index out of range in self")
    assert [path.name for path in (run.folder / "quarantine").iterdir()] == [f"group_{BAD}_0.bin"]
    batches = list(recorded_batches(run.folder / "journal"))
    assert [group.group_id for batch in batches for group in batch.groups] == list(range(7 * 4))
    assert cli.main(["audit", str(run.folder)]) == 0
    assert "of them quarantined 1" in capsys.readouterr().out
    command = [sys.executable, "-m", "streamrl.cli", "retrain", str(run.folder), "--output", str(tmp_path / "again")]
    again = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)  # torchrun takes its place
    assert again.returncode == 0, again.stderr
    assert "bit for bit" in again.stdout
