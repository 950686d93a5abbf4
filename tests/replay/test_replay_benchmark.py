"""The benchmark of the replay service still drives the buffer and its journal as the service does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_part_of_the_benchmark_gives_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ["--quick", "--seconds", "0.3", "--folder", str(tmp_path), "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replay", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(figures.read_text())
    assert told["bookkeeping"]["us"] > 0
    assert told["journal"][0]["ratio_plain"] > 0
    assert (told["load"]["groups"], told["load"]["steps"]) == (300, 300 // 64)
    assert list(tmp_path.iterdir()) == [figures]
