"""The benchmark of the wire still sends what a worker and the service send each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_path_of_the_benchmark_gives_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ["--quick", "--lengths", "64", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rollout_path", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    for path in ("raw", "stream", "apart", "curve", "orjson", "pickle"):
        assert row[path]["groups_per_s"] > 0
        assert row[path]["cpu_us"] > 0
