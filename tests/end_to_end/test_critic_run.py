"""The quickstart with a critic: the reward climbs, values say something, and a killed learner goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
DEADLINE = 3600.0  # seconds
START, BAR = (
    0.2,
    0.8,
)  # mean reward of the first five and of the last ten steps, those of the quickstart in every layout
EXPLAINED = 0.05  # share of the variance of returns that values explain in the best ten steps, by their mean
CRITIC = (
    "algo.advantage.estimator=gae",
    "critic.warmup_steps=5",
    "critic.optimizer.lr=2.0e-3",
    "critic.optimizer.warmup_steps=5",
)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE)
def test_the_quickstart_learns_with_a_critic_through_a_kill_and_trains_again_bit_for_bit(tiny_model, tmp_path, capsys):
    run = tmp_path / "quickstart"
    command = [sys.executable, "-m", "streamrl.cli", "train", str(QUICKSTART), f"run.folder={tmp_path}"]
    command += [
        f"model.path={tiny_model}",
        "run.start_timeout=900",
        "run.silence_timeout=1800",
        "checkpoint.every=20",
        "run.steps=110",
        *CRITIC,
    ]
    log = tmp_path / "train.log"
    with log.open("w") as output:
        training = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _await_steps(training, run, 50)
            os.kill(_starts(run)[-1], signal.SIGKILL)
            code = training.wait(timeout=DEADLINE)
        finally:
            training.terminate()
            training.wait()
    assert code == 0, log.read_text()[-4000:]
    assert len(_starts(run)) == 2
    rows = list(read_metrics(run))
    steps = rows[-1]["step"]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[4]["steps/updates"] == 0, "the critic is warmed up first"
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < START, rewards
    assert sum(rewards[-10:]) / 10 > BAR, rewards
    explained = sorted(row.get("critic/explained_variance", 0.0) for row in rows)
    assert sum(explained[-10:]) / 10 > EXPLAINED, explained
    assert cli.main(["audit", str(run)]) == 0, capsys.readouterr().out
    assert cli.main(["retrain", str(run), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {steps}: bit for bit" in capsys.readouterr().out


def _await_steps(training: subprocess.Popen, run: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while not (run / "metrics.jsonl").exists() or len(list(read_metrics(run))) < count:
        assert training.poll() is None, "the run ended before its learner was killed"
        assert time.monotonic() < deadline, f"no {count} steps in time"
        time.sleep(0.2)


def _starts(run: Path) -> list[int]:
    """The process ids with which the learner was started."""
    events = read_events(run / "events" / "learner-0.jsonl")
    return [event["pid"] for event in events if event["event"] == "process.start"]
