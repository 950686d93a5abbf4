"""Real runs of models whose layers, router or server are unlike the others': their log-probs are audited."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import tiny_model
from streamrl.observe.metrics import read_metrics
from tests.documented_commands import ROOT
from tests.slow_families import slow_but

STEPS = 20
SMALL = (f"run.steps={STEPS}", "generate.group_size=4", "generate.groups_in_flight=8", "replay.groups_per_step=4")
DEADLINE = 900.0
REPLAY = "learner.router_replay=true"
EXACT = 1e-4  # of a log-prob in float32
SETTINGS = {
    "qwen3": (),
    "qwen3_moe": (REPLAY,),
    "llama": (),
    "mistral": (),
    "seed_oss": (),
    "glm4": (),
    "glm4_moe": (REPLAY,),
    "deepseek_v3": (REPLAY,),
    "moonlight": (REPLAY,),
    "gpt_oss": (REPLAY,),
    "mixtral": (REPLAY,),
    "gemma3_text": (),
    "phi3": (),
    "nemotron_h": (),
    "nemotron_3": (REPLAY,),
}


@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize("family", slow_but(SETTINGS, "deepseek_v3"))  # the quickstart's is the second
def test_a_run_trains_publishes_and_is_audited(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model.make(tmp_path / "model", family=family)
    settings = ("run.name=run", "model.path=model", *SMALL, *SETTINGS[family])
    streamrl("train", str(ROOT / "configs/quickstart.yaml"), *settings)
    rows = list(read_metrics(tmp_path / "runs" / "run"))
    assert len(rows) == STEPS
    assert rows[0]["offpolicy/log_ratio_max"] < EXACT  # the learner's own log-probs, with the servers' experts
    assert "tokens audited" in streamrl("audit", "runs/run")


def streamrl(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "streamrl.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
