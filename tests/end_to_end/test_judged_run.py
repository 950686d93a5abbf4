"""A run whose answers a language model judges: an endpoint beside it, asked by the worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.observe.metrics import read_metrics
from tests.documented_commands import ROOT
from tests.generate import openai_endpoint

pytestmark = pytest.mark.slow

STEPS = 2
DEADLINE = 500.0  # seconds; a start of SGLang on two busy cores may take a hundred


def test_a_run_trains_on_the_scores_of_a_judge(tiny_model: Path, tmp_path: Path):
    with openai_endpoint.serving() as endpoint:
        endpoint.key = "secret"
        judged = {
            "task": {"name": "copy", "args": {"length": 2}},
            "model": str(tiny_model),
            "question": "{answer}",
            "verdict": "([a-h])$",  # of "cd=hb", which the endpoint always says
            "scores": {"b": 0.5},
            "weight": 0.5,
            "engine_options": {"url": endpoint.url, "key_variable": "JUDGE_KEY"},
        }
        settings = {
            "run": {"name": "run", "folder": str(tmp_path), "steps": STEPS},
            "model": {"path": str(tiny_model)},
            "task": {"name": "judged", "args": judged},
            "generate": {"group_size": 2, "groups_in_flight": 4, "sampling": {"max_new_tokens": 4}},
            "replay": {"groups_per_step": 2},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(settings))
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "train", str(tmp_path / "config.yaml")],
            env=os.environ | {"PYTHONPATH": str(ROOT), "JUDGE_KEY": "secret"},
            cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(read_metrics(tmp_path / "run"))
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["reward/part/judge"] for row in rows] == [0.5, 0.5]
    assert all(0.25 <= row["reward/mean"] <= 0.75 for row in rows)
    assert len(endpoint.asked) >= STEPS * 4 + 1
    assert "secret" not in (tmp_path / "run" / "config.yaml").read_text()
