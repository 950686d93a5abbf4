"""New weights from the learner to the servers, by each transport, against a plain copy of as many bytes.

    python -m benchmarks.publish [--quick] [--servers] [--json PATH]

    memcpy      numpy copies the weights from one place in memory to another, in one thread
    staging     the learner's copy that every transport sends from
    broadcast   gloo, one group per receiver, buckets of 256 MiB
    disk        a safetensors folder, written once, read twice by each receiver (checksum, load)
    memory      receivers copy out of the staging copy, one after another, as servers get a version by default
    at once     the same with publish.at_once = the number of receivers
    delta       what changed since the version before, over a socket, and checksums; 3% of the values, at random places

A receiver is a process with a model's tensors (`benchmarks/publish_receiver.py`). The learner's end is what the
publisher does: source.manifest and source.send, one receiver after another unless it says otherwise. The clock runs
from the staging copy until the last receiver has the weights in its tensors. `of memcpy` is bytes x receivers / s
over the rate of memcpy just before; `with staging` counts the staging copy as well. Figures are medians over the
repeats, transports take turns within each, the spread is (max - min) / median. What arrived is compared bit for bit.

`--servers` measures real SGLang servers instead (`benchmarks/publish_servers.py`). The exit code is 1 where a bar is
missed: delta at least 20 times fewer bytes than the weights; in the full form, memory with the most receivers, at
once, at least 0.8 of memcpy and at least twice broadcast's ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.publish_receiver import DEADLINE, Order, Shapes, checksum_of, receive
from benchmarks.repeats import spread
from streamrl.config.replay import StreamConfig
from streamrl.device import Device
from streamrl.engine.kept_memory import DoubleMemory
from streamrl.lab.output import output_file
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.delta_source import DeltaSource
from streamrl.publish.disk_source import DiskSource
from streamrl.publish.memory_source import MemorySource
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

BUCKET = 256 << 20  # bytes, `publish.bucket`
CHANGED = 0.03  # share of the values that differ between two versions
POLL = 0.002  # seconds of one look at the replay service while bytes are under way, as the publisher's
TRANSPORTS = ("broadcast", "disk", "memory", "at once", "delta")
MEMORY_BAR, OVER_GLOO_BAR, DELTA_BAR = 0.8, 2.0, 20.0


def shapes_of(layers: int, vocabulary: int) -> Shapes:
    """Of a model like Qwen2.5-0.5B, which has 24 layers and 151936 tokens: 0.99 GB in bf16."""
    hidden, inner, keys = 896, 4864, 128
    layer: Shapes = {
        "q": (hidden, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "norm": (hidden,),
    }
    layered = {f"{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    return {"embed": (vocabulary, hidden), **layered, "norm": (hidden,)}


class Weights:
    """The learner's weights, and what an optimizer step does to them as far as publishing sees it."""

    def __init__(self, shapes: Shapes) -> None:
        self._random = np.random.default_rng(0)
        self.tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> None:
        """Change a share of the values by one unit in the last place."""
        for tensor in self.tensors.values():
            words = tensor.view(-1).view(torch.int16).numpy()
            places = self._random.integers(0, len(words), int(CHANGED * len(words)))
            words[places] ^= 1


@dataclass
class Receivers:
    """Processes, and what to say to them."""

    connections: list[Connection]

    def check(self, expected: str) -> None:
        for connection in self.connections:
            connection.send(Order())
            assert connection.recv() == expected, "what arrived is not what was sent"


@contextlib.contextmanager
def receivers(count: int, shapes: Shapes) -> Iterator[Receivers]:
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=receive, args=(shapes, theirs), daemon=True)
        process.start()
        connections.append(ours)
        processes.append(process)
    try:
        yield Receivers(connections)
    finally:
        for connection, process in zip(connections, processes, strict=True):
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
            process.join(10)


@contextlib.contextmanager
def sources(folder: Path) -> Iterator[dict[str, Source]]:
    model = folder / "model"
    model.mkdir()
    made: dict[str, Source] = {
        "broadcast": BroadcastSource("127.0.0.1", Device("cpu", 0), DEADLINE),
        "disk": DiskSource(folder / "published", model),
        "memory": MemorySource(verify_every=0),
        "delta": DeltaSource("127.0.0.1", StreamConfig(curve="off"), folder, verify_every=0),
    }
    try:
        yield made
    finally:
        for source in made.values():
            source.close()


def publish(transport: str, source: Source, staged: Staged, connections: list[Connection], at_once: int) -> float:
    """Seconds until every receiver has the version."""
    began = time.perf_counter()
    for first in range(0, len(connections), at_once):
        together = connections[first : first + at_once]
        for index, connection in enumerate(together, first):
            state = ServerState(name=f"server-{index}", version=PolicyVersion(0))
            manifest = source.manifest(state, staged)
            connection.send(Order(transport, staged.version, manifest))
            source.send(state, staged, lambda: time.sleep(POLL))
        for connection in together:
            connection.recv()
    return time.perf_counter() - began


class Copy:
    """memcpy of as many bytes as the weights have."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def rate(self) -> float:
        """Bytes a second."""
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return len(self._source) / (time.perf_counter() - began)


@dataclass(frozen=True)
class Run:
    rate: float  # bytes a second, of all receivers together
    ratio: float  # to memcpy
    with_staging: float


def measure(count: int, weights: Weights, shapes: Shapes, repeats: int) -> dict[str, Any]:
    """Medians and spreads of every transport with `count` receivers."""
    staging, copy = Staging(BUCKET, DoubleMemory()), Copy(weights.bytes)
    runs: dict[str, list[Run]] = {name: [] for name in ("staging", *TRANSPORTS)}
    fewer: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sources(Path(folder)) as made, receivers(count, shapes) as processes:
        delta = made["delta"]
        assert isinstance(delta, DeltaSource)
        for repeat in range(repeats + 2):  # the first two map both halves of the memory and make the groups
            weights.step()
            plain = copy.rate()
            began = time.perf_counter()
            staged = staging.fill(PolicyVersion(repeat), weights.tensors.items())
            stage = time.perf_counter() - began
            rows = {"staging": Run(weights.bytes / stage, weights.bytes / stage / plain, 0.0)}
            for name in TRANSPORTS:
                plain, sent = copy.rate(), delta.parcels.sent
                transport, at_once = ("memory", count) if name == "at once" else (name, 1)
                seconds = publish(transport, made[transport], staged, processes.connections, at_once)
                total = count * weights.bytes
                rows[name] = Run(total / seconds, total / seconds / plain, total / (seconds + stage) / plain)
                if name == "delta":
                    fewer.append(total / (delta.parcels.sent - sent))
                if repeat in (0, repeats + 1):
                    processes.check(checksum_of(weights.tensors))
            if repeat > 1:
                for name, row in rows.items():
                    runs[name].append(row)
    result: dict[str, Any] = {"receivers": count, "bytes": weights.bytes}
    for name, each in runs.items():
        ratios = [run.ratio for run in each]
        result[name] = {
            "gb_per_s": statistics.median(run.rate for run in each) / 1e9,
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "ratio_spread": spread(ratios),
            "ratio_with_staging": statistics.median(run.with_staging for run in each),
        }
    result["delta"]["fewer_bytes"] = statistics.median(fewer[2:])
    over = [memory.ratio / gloo.ratio for memory, gloo in zip(runs["at once"], runs["broadcast"], strict=True)]
    result["memory_over_broadcast"] = statistics.median(over)
    return result


def show(row: dict[str, Any]) -> None:
    for name in ("staging", *TRANSPORTS):
        figures = row[name]
        note = f"   {figures['fewer_bytes']:.1f} times fewer bytes" if name == "delta" else ""
        print(
            f"{row['receivers']:9d}   {name:9s} {figures['gb_per_s']:7.2f} {figures['ratio']:10.3f}"
            f" ({figures['ratio_spread']:4.0%}) {figures['ratio_with_staging']:13.3f}{note}",
            flush=True,
        )


def judge(rows: list[dict[str, Any]], quick: bool) -> bool:
    """Print each bar with what was reached; whether all are held. The quick form's speeds are not judged."""
    most = rows[-1]
    speeds = [
        (f"memory at {most['receivers']} receivers at once, of memcpy", most["at once"]["ratio"], MEMORY_BAR),
        ("memory over broadcast", most["memory_over_broadcast"], OVER_GLOO_BAR),
    ]
    judged = [("delta, times fewer bytes", min(row["delta"]["fewer_bytes"] for row in rows), DELTA_BAR)]
    if quick:
        for name, value, bar in speeds:
            print(f"{name}: {value:.2f}, bar {bar:g}: not judged in the quick form")
    else:
        judged += speeds
    for name, value, bar in judged:
        print(f"{name}: {value:.2f}, bar {bar:g}: {'held' if value >= bar else 'MISSED'}")
    return all(value >= bar for _, value, bar in judged)


def ratios_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What later runs are compared with."""
    return [
        {
            "name": f"publish {name}, {row['receivers']} receivers, of memcpy",
            "median": row[name]["ratio"],
            "low": row[name]["ratio_low"],
            "high": row[name]["ratio_high"],
        }
        for row in rows
        for name in TRANSPORTS
    ]


def receivers_alone(quick: bool) -> tuple[list[dict[str, Any]], bool]:
    shapes = shapes_of(4, 40_000) if quick else shapes_of(24, 151_936)
    weights = Weights(shapes)
    print(f"weights of {weights.bytes / 1e9:.2f} GB in bf16")
    print("receivers   transport    GB/s  of memcpy (spread)  with staging")
    rows = []
    for count in (1, 4) if quick else (1, 2, 4):
        rows.append(measure(count, weights, shapes, repeats=5))
        show(rows[-1])
    return rows, judge(rows, quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the weights, 1 and 4 receivers")
    parser.add_argument("--servers", action="store_true", help="real SGLang servers under load instead")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.servers:
        from benchmarks.publish_servers import servers

        rows, held = servers(options.quick)
    else:
        rows, held = receivers_alone(options.quick)
    if options.json:
        ratios = [] if options.servers else ratios_of(rows)
        written = {"benchmark": "publish", "rows": rows, "held": held, "ratios": ratios}
        options.json.write_text(json.dumps(written) + "\n")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
