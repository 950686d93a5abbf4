"""The whole circle, synchronous (bound 0) against asynchronous (bound 2): tokens a second, idle fractions, staleness.

Both modes run on one SGLang server that stays up, one after the other, several times; every figure is the
median over the repeats, with the smallest and largest beside it. Ratios are taken inside each repeat.
The limit is the server alone: the same prompts, as many at once, from a client that neither scores nor trains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.engine.client import EngineClient
from streamrl.engine.server import serving
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from streamrl.tasks.registry import build_task

WARM_UP = 3  # first steps of a run that no figure counts: caches fill, the pipeline of groups is still empty
RUN_TIMEOUT = 600.0  # seconds that one run may take
MODES = {"sync": 0, "async": 2}  # name: replay.max_staleness

FIGURES = {
    "tokens/s generated": lambda rows: _rate(rows, "tokens/generated"),
    "tokens/s trained": lambda rows: _rate(rows, "tokens/trained"),
    "steps/s": lambda rows: len(rows) / sum(row["time/step"] for row in rows),
    "idle learner": lambda rows: _share(rows, "idle/learner"),
    "idle generator": lambda rows: _share(rows, "idle/generator"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--quick", action="store_true", help="short runs (20 steps instead of 100)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats, at least 5 for a ratio")
    parser.add_argument("--json", type=Path, help="write the figures of every run here")
    parser.add_argument("override", nargs="*", metavar="key=value", help="keys of the configuration")
    options = parser.parse_args()
    steps = 20 if options.quick else 100

    base = config_file.load(options.config, options.override)
    # One server for all runs, so that its start is in no figure.
    with tempfile.TemporaryDirectory() as folder, serving(base, Path(folder)) as server:
        address = server.address
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        limits: list[float] = []
        for repeat in range(options.repeats):
            for mode, bound in MODES.items():
                name = f"{mode}-{repeat}"
                overrides = [*options.override, f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}"]
                overrides += [f"replay.max_staleness={bound}", f"generate.attach=[{address}]", "generate.workers=1"]
                overrides += ["generate.probes=0", "publish.keep_every=0", "observe.console=false"]
                runs[mode].append(_run(options.config, overrides, Path(folder) / name))
            config = config_file.load(options.config, [*options.override, f"generate.attach=[{address}]"])
            limits.append(asyncio.run(_server_alone(config, address, steps)))
    _print(runs, limits, steps)
    if options.json:
        figures = {"steps": steps, "cpus": os.cpu_count(), "runs": runs, "server alone": limits}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


async def _server_alone(config: Config, address: str, steps: int) -> float:
    """Tokens a second of the server, asked for the groups of `steps` learner steps, `groups_in_flight` at once."""
    client = EngineClient(address, config.generate.request_timeout)
    inference = EngineInference(client, Tokenizer(config.model.path), config.generate, load := Load())
    task = build_task(config.task, config.run.seed, split="train")
    slots = asyncio.Semaphore(config.generate.groups_in_flight)

    async def group(index: int) -> None:
        async with slots:
            await inference.generate(task.prompt(index).content, config.generate.group_size)

    began = time.monotonic()
    await asyncio.gather(*(group(index) for index in range(steps * config.replay.groups_per_step)))
    seconds = time.monotonic() - began
    await task.close()
    await client.close()
    return load.generated / seconds


def _run(config: Path, overrides: Sequence[str], run_folder: Path) -> dict[str, float]:
    """One run in processes of its own; the figures of its steps after the warm-up."""
    command = [sys.executable, "-m", "streamrl.cli", "train", str(config), *overrides]
    done = subprocess.run(command, timeout=RUN_TIMEOUT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    rows = list(read_metrics(run_folder))[WARM_UP:]
    return {name: figure(rows) for name, figure in FIGURES.items()} | _staleness(run_folder)


def _staleness(run_folder: Path) -> dict[str, float]:
    """Percentiles over all trained tokens after the warm-up, from the journal."""
    ages = np.concatenate(
        [
            (batch.step - sample.token_steps())[sample.loss_mask]
            for batch in recorded_batches(run_folder / "journal")
            if batch.step >= WARM_UP
            for sample in batch.samples
        ]
    )
    return {f"staleness p{share}": float(np.percentile(ages, share)) for share in (50, 95, 100)}


def _rate(rows: Sequence[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / sum(row["time/step"] for row in rows)


def _share(rows: Sequence[dict[str, float]], key: str) -> float:
    """The mean of a fraction of the time, each step weighted by its length."""
    return float(np.average([row[key] for row in rows], weights=[row["time/step"] for row in rows]))


def _print(runs: dict[str, list[dict[str, float]]], limits: Sequence[float], steps: int) -> None:
    repeats = len(limits)
    table = Table(title=f"{repeats} interleaved repeats of {steps} steps: median (smallest .. largest)")
    for column in ("", "sync, bound 0", "async, bound 2", "async / sync"):
        table.add_column(column, justify="left" if not column else "right")
    for name in runs["sync"][0]:
        synchronous, asynchronous = ([run[name] for run in runs[mode]] for mode in MODES)
        ratios = [after / before for before, after in zip(synchronous, asynchronous, strict=True) if before]
        rated = name.startswith(("tokens", "steps")) and len(ratios) >= 5
        table.add_row(name, _spread(synchronous), _spread(asynchronous), _spread(ratios) if rated else "")
    shares = [
        _spread([run["tokens/s generated"] / limit for run, limit in zip(runs[mode], limits, strict=True)])
        for mode in MODES
    ]
    table.add_row("of the limit", *shares, "")
    console = Console(width=120)
    console.print(table)
    console.print(f"limit: the server alone generates {_spread(limits)} tokens/s")


def _spread(values: Sequence[float]) -> str:
    return f"{np.median(values):.4g} ({min(values):.4g} .. {max(values):.4g})"


if __name__ == "__main__":
    raise SystemExit(main())
