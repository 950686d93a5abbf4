"""The whole loop with a learner of several ranks, and with everything that a step may do before and between updates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.observe.metrics import read_metrics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "sharding=full"])
def test_a_run_on_two_ranks_keeps_every_promise_and_trains_again_bit_for_bit(make_run, tmp_path, capsys, layout):
    run = make_run(steps=4).start("learner.ranks=2", f"learner.layout.{layout}", "checkpoint.every=2")
    code, output = run.finish()
    assert code == 0, output
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
    retrain = [sys.executable, "-m", "streamrl.cli", "retrain", str(run.folder), "--output", str(tmp_path / "again")]
    again = subprocess.run(retrain, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert "bit for bit" in again.stdout


@pytest.mark.slow
def test_a_run_with_reference_recomputed_policy_passes_and_mini_batches_keeps_every_promise(make_run, capsys):
    run = make_run(steps=6).start(
        "learner.passes=2", "learner.mini_batches=2", "algo.proximal=recompute", "algo.kl=0.01", "checkpoint.every=2"
    )
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["steps/updates"] for row in rows] == [4, 8, 12, 16, 20, 24]
    divergences = [row["loss/kl"] for row in rows]
    assert 0 < divergences[0] < sum(divergences[-3:]) / 3, divergences  # the policy leaves its reference
    assert all(row["time/scores"] > 0 for row in rows)
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_run_whose_every_gradient_is_a_spike_ends_with_one_line_and_its_batch(make_run):
    """A bonus that no float32 holds: no gradient is finite."""
    run = make_run(steps=40).start("algo.entropy=1.0e+39", "learner.bad_steps=3", "learner.optimizer.clip_grad=0")
    code, output = run.finish()
    assert code == 1, output
    (batch,) = run.folder.glob("bad_batch_*.bin")
    assert str(batch) in output
    assert "learner.bad_steps" in output


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_quickstart_learns_on_two_ranks_as_on_one(tiny_model, tmp_path):
    """By data; the gradients of every other layout equal one rank's in tests/learner."""
    command = [sys.executable, "-m", "streamrl.cli", "train", str(QUICKSTART), f"run.folder={tmp_path}"]
    command += [f"model.path={tiny_model}", "learner.ranks=2", "run.steps=100"]
    subprocess.run(command, check=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "quickstart")]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-10:]) / 10 > 0.8
