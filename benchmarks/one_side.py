"""Each side of a run alone on its core: what generation, and what training, could do if it never waited for the other.

    python -m benchmarks.one_side RUN      the learner of a run that takes no time: every batch is taken at once

Generation alone: the real service, worker and server with such a learner, and slots for the whole run.
Training alone: the real learner on the batches that a former run has recorded (`streamrl retrain`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pinned import on_core
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.learner.batch_metrics import batch_metrics
from streamrl.learner.batches import ServiceBatches
from streamrl.lifeline import end_with
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.metrics import MetricsWriter, read_metrics
from streamrl.types import PolicyVersion

GRACE = 10.0  # seconds to end after the process that started this has gone


def taker(run_folder: Path) -> list[str]:
    """The command of the learner that takes no time."""
    return [sys.executable, "-m", "benchmarks.one_side", str(run_folder)]


def train_side(config: Config, run_folder: Path) -> None:
    """Every batch of a run as soon as it is complete, each with a row of the run's metrics."""
    events, metrics = EventLog(event_path(run_folder, "learner"), "learner-0"), MetricsWriter(run_folder)
    version = PolicyVersion(0)
    source = ServiceBatches(config, run_folder, version)
    while not source.begun(config.learner.tick):
        pass
    events.emit("ready", version=str(version))
    asked = time.monotonic()
    while version.step < config.run.steps:
        delivery = source.next(version.step, config.learner.tick)
        if delivery.kind == "stop":
            break
        if delivery.batch is None:
            continue
        version = PolicyVersion(version.step + 1)
        source.trained(version, {})
        taken = time.monotonic()
        times = {"time": time.time(), "time/step": taken - asked, "time/wait": taken - asked}
        metrics.write({"step": version.step, **times, **batch_metrics(delivery.batch), **delivery.stats})
        asked = taken
    source.end(version)
    source.close()
    metrics.close()
    events.close()


def trained_alone(
    run_folder: Path, output: Path, *, core: int, steps: int, timeout: float, changes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The metrics of the learner on the first `steps` recorded batches, whatever it was told to do otherwise.

    Raises SystemExit with its output where it fails, and subprocess.TimeoutExpired after `timeout` seconds.
    """
    command = [sys.executable, "-m", "streamrl.cli", "retrain", str(run_folder)]
    command += ["--output", str(output), "--steps", str(steps), *(("--set", *changes) if changes else ())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(on_core(core, command), timeout=timeout, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return list(read_metrics(output))


def main() -> int:
    run_folder = Path(sys.argv[1])
    end_with([os.getppid()], GRACE)
    train_side(config_file.load(run_folder / "config.yaml"), run_folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
