"""`streamrl doctor --gpu`: run the checks one after another, each in its process, and print one table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.config.file import ConfigError
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.lab.acceptance.check import Bench, Check, Gpu, Result
from streamrl.lab.acceptance.checks import chosen
from streamrl.lab.acceptance.child import BENCH, result_file
from streamrl.lab.acceptance.trial import last_lines
from streamrl.lab.output import check_file
from streamrl.lifeline import end_tree
from streamrl.observe.bars import track

QUERY = ("--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits")
ASKING = 60.0  # seconds that the driver may take to describe the GPUs
MAKING = 120.0  # seconds that making a tiny model may take
GRACE = 40.0  # seconds between SIGTERM and SIGKILL of a check that is late: longer than its run takes to end

WIDTH = 140  # columns of the table

STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def main(*, quick: bool, only: Sequence[str], output: Path | None, model: Path | None) -> int:
    """Run, print, write the JSON. Returns 1 where a check has failed, else 0. Raises ConfigError."""
    check_file("--json", output)
    checks = chosen(only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} is no model; allowed: a Hugging Face folder")
    folder = Path(tempfile.mkdtemp(prefix="streamrl-doctor-"))
    try:
        bench = make_bench(folder, model, quick=quick)
        results = run(checks, bench)
    except BaseException:
        print(f"streamrl: what was done so far is in {folder}", file=sys.stderr)
        raise
    show(results, Console(width=WIDTH))
    failed = [result for result in results if result.result == "failed"]
    if output is not None:
        output.write_text(
            json.dumps({"quick": quick, "checks": [msgspec.to_builtins(each) for each in results]}, indent=1) + "\n"
        )
    if failed:
        print(
            f"streamrl: {len(failed)} of {len(results)} checks failed; their runs and logs are in {folder}",
            file=sys.stderr,
        )
        return 1
    shutil.rmtree(folder)
    return 0


def make_bench(folder: Path, model: Path | None, *, quick: bool) -> Bench:
    """Describe the machine, make the models that are not given."""
    made = {"tiny": folder / "models/tiny", "experts": folder / "models/experts"}
    for name, target in made.items():
        family = ["--family", "qwen3_moe"] if name == "experts" else []
        words = [sys.executable, "-m", "streamrl.launch.tiny_model", str(target), *family]
        done = subprocess.run(words, timeout=MAKING, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{target}: {done.stderr.strip().splitlines()[-1]}; allowed: a folder to write models in")
    gpus, driver = describe_gpus() if has_cuda() else ((), "")
    bench = Bench(
        folder=folder,
        tiny=made["tiny"],
        experts=made["experts"],
        own=None if model is None else model.absolute(),
        quick=quick,
        gpus=gpus,
        driver=driver,
    )
    (folder / BENCH).write_bytes(encoded(bench))
    return bench


def encoded(bench: Bench) -> bytes:
    """As the process of a check reads it."""
    return msgspec.json.encode(bench, enc_hook=str)


def describe_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Those that may be used, as nvidia-smi has them, and the driver's version. Raises ConfigError without it."""
    names = visible_gpus()
    try:
        told = subprocess.run(
            ["nvidia-smi", "-i", ",".join(names), *QUERY], capture_output=True, text=True, timeout=ASKING
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi: {error}; allowed: a driver that describes its GPUs") from None
    if told.returncode:
        raise ConfigError(
            f"nvidia-smi: {told.stdout.strip() or told.stderr.strip()}; allowed: a driver that describes its GPUs"
        )
    return parse_gpus(told.stdout)


def parse_gpus(told: str) -> tuple[tuple[Gpu, ...], str]:
    """
    >>> parse_gpus("NVIDIA H200, 9.0, 143771, 580.95.05")
    ((Gpu(name='NVIDIA H200', capability=9.0, memory=143771),), '580.95.05')
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.strip()]
    gpus = tuple(Gpu(name=name, capability=float(level), memory=int(memory)) for name, level, memory, _ in rows)
    return gpus, rows[0][3] if rows else ""


def run(checks: Iterable[Check], bench: Bench) -> list[Result]:
    """One row for each check. What another one had to be there for is skipped where that has not passed."""
    results: dict[str, Result] = {}
    for check in track(checks, "acceptance", "checks"):
        before = results.get(check.after)
        if before is not None and before.result != "ok":
            reason = f"{check.after} has {'failed' if before.result == 'failed' else 'been skipped'}"
            results[check.name] = Result(check=check.name, result="skipped", reason=reason)
        else:
            print(f"{check.name}: {check.what}", file=sys.stderr, flush=True)
            results[check.name] = run_one(check, bench)
    return list(results.values())


def run_one(check: Check, bench: Bench) -> Result:
    """In a process of its own, ended with all that it has started at its deadline."""
    log = bench.folder / "logs" / f"{check.name}.log"
    log.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as written:
        words = [sys.executable, "-m", f"{__package__}.child", str(bench.folder), str(os.getpid())]
        words += [check.name, check.run, *check.arguments]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    reason = ""
    try:
        code = process.wait(check.deadline)
        reason = f"its process ended with {code}: {last_lines(log)}"
    except subprocess.TimeoutExpired:
        reason = f"not done in {check.deadline:g} s: {last_lines(log)}"
    finally:
        end_tree(process.pid, timeout=GRACE if process.poll() is None else 0)
    file = result_file(bench.folder, check.name)
    if process.returncode == 0 and file.is_file():
        return msgspec.json.decode(file.read_bytes(), type=Result)
    return Result(check=check.name, result="failed", seconds=time.monotonic() - began, reason=reason)


def show(results: Sequence[Result], console: Console) -> None:
    """The table; what failed or was skipped has its reason where the others have their figure."""
    table = Table(title="acceptance", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("figure, or reason", overflow="fold")
    table.add_column("expected", overflow="fold")
    for each in results:
        table.add_row(
            each.check, f"[{STYLES[each.result]}]{each.result}[/]", f"{each.seconds:.0f}",
            each.reason or each.figure, each.expected,
        )  # fmt: skip
    console.print(table)
