"""Log ratios of exactly 0: the learner's pass is the servers' prefill, bit for bit, in a real synchronous run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import tiny_model
from streamrl.observe.metrics import read_metrics
from tests.documented_commands import ROOT

DEADLINE = 900.0  # seconds of one command
STEPS = 6
AS_SERVED = ("generate.score=full_prefill", "learner.as_served=true")
ROUNDED = 1e-5  # of a log-prob in float32


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE)
@pytest.mark.parametrize(("family", "settings"), [("qwen2", AS_SERVED), ("qwen3", AS_SERVED), ("qwen2", ())])
def test_data_of_the_newest_weights_is_on_policy_to_the_bit_as_served_alone(family, settings, tmp_path):
    tiny_model.make(tmp_path / "model", family=family)
    command = [sys.executable, "-m", "streamrl.cli", "train", str(ROOT / "configs/quickstart.yaml"), *settings]
    command += ["run.name=run", "model.path=model", f"run.steps={STEPS}", "replay.max_staleness=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(read_metrics(tmp_path / "runs" / "run"))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/max"] == 0 and row["tokens/trained"] > 1000 for row in rows)
    ratios = [row["offpolicy/log_ratio_max"] for row in rows]
    print(f"{family}, {settings or 'decode'}: {ratios}")
    if settings:
        assert ratios == [0.0] * STEPS
    else:
        assert all(0 < ratio < ROUNDED for ratio in ratios)
