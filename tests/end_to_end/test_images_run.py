"""Images through the whole circle: a tiny vision-language model is served, trained, published, audited, retrained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from launch import tiny_vl_model
from streamrl.lab.audit.logprobs import Stamped, load_kept, logprobs
from streamrl.observe.metrics import read_metrics
from streamrl.recorded.journal import batches
from tests.documented_commands import ROOT

DEADLINE = 1500.0  # seconds of one command
STEPS = {"qwen2_5_vl": 24, "qwen3_vl": 20, "qwen3_vl_moe": 20}
REPLAY = {"qwen3_vl_moe": ("learner.router_replay=true",)}
EXACT = 1e-4  # of a log-prob in float32


@pytest.mark.slow
@pytest.mark.timeout(4 * DEADLINE)
@pytest.mark.parametrize("family", STEPS)
def test_a_run_on_images_learns_is_audited_and_retrains_bit_for_bit(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_vl_model.make(tmp_path / "model", family=family)
    steps = STEPS[family]
    settings = ("run.name=run", "model.path=model", f"run.steps={steps}", f"checkpoint.every={steps}")
    settings += ("run.start_timeout=900", *REPLAY.get(family, ()))
    streamrl("train", str(ROOT / "configs/images.yaml"), *settings)
    run = tmp_path / "runs" / "run"
    rows = list(read_metrics(run))
    assert rows[0]["offpolicy/log_ratio_max"] < EXACT  # the learner's own log-probs, with the servers' experts
    rewards = [row["reward/mean"] for row in rows]
    print(f"{family}: rewards {rewards[0]:.3f} ... {rewards[-1]:.3f}")
    assert len(rewards) == steps
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3]) + 0.02
    told = streamrl("audit", "runs/run")
    print(told)
    assert "every checked promise held" in told
    told = streamrl("retrain", "runs/run", "--output", "again")
    assert f"equal to the run's weights of step {steps}: bit for bit" in told
    seen, blind = differences(run, tmp_path / "model")
    print(f"{family}: log-prob differences {seen:.1e}, without the image {blind:.2f}")
    assert seen < EXACT
    assert blind > 0.1
    streamrl("journal", "runs/run", "--export", "rows.jsonl")
    streamrl("report", "runs/run")
    rows = map(json.loads, Path("rows.jsonl").read_text().splitlines())
    names = {name for row in rows for name in row["images"]}
    assert names == {file.name for file in (tmp_path / "rows.images").iterdir()}
    assert "data:image/png;base64," in (run / "report.html").read_text()


def differences(run: Path, folder: Path) -> tuple[float, float]:
    """Largest differences of the first batch's log-probs to those of the first weights: with images, and without."""
    first = next(batches(run))
    shown = [
        Stamped(sample, 0, len(sample.output_ids), group.temperature, images=group.images)
        for group in first.groups
        for sample in group.answered[:2]
    ]
    assert {span.version.step for each in shown for span in each.sample.spans} == {0}
    model = load_kept(folder, AutoConfig.from_pretrained(folder), folder)
    found = []
    for spans in (shown, [each._replace(images=()) for each in shown]):
        with torch.inference_mode():
            given = [logprobs(model, [each], folder)[0] for each in spans]
        found.append(max(np.abs(a - b.sample.logprobs).max() for a, b in zip(given, spans, strict=True)))
    return found[0], found[1]


def streamrl(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "streamrl.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
