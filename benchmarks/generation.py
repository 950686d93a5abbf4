"""What a worker costs its server: tokens/s of groups made by a worker against the same requests by a bare client.

    python -m benchmarks.generation [--quick] [--model FOLDER] [--json PATH]

    bare     asyncio and aiohttp: a request posted, its answer read and its JSON decoded, nothing else
    worker   the whole way of a ticket: placement, request, pieces joined, checked, scored, encoded for the wire

One real SGLang server answers both. A request is one prompt with n = 16; so many are in flight at once. The paths
take turns, so that a noisy machine slows both; ratios are formed between neighbours, figures are medians over the
repeats, the spread is (max - min) / median. CPU is the client's own, as a share of one core; on a small machine
the server pays for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.repeats import spread
from launch import tiny_model
from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.engine.keys import EngineKeys
from streamrl.engine.server import Server
from streamrl.generate.fleet import Fleet
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.served import engine_keys
from streamrl.generate.tokenizer import Tokenizer
from streamrl.lab.output import output_file
from streamrl.observe.events import EventLog
from streamrl.stream.codec import encode_group
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.registry import build_task
from streamrl.types import PolicyVersion, Ticket

BAR = 0.95  # of the bare client's tokens/s
SAMPLES = 16  # n
TOKENS = 64  # of an answer, unless it ends before
IN_FLIGHT = (1, 16, 64)
GROUPS = {1: 12, 16: 32, 64: 96}  # of a run: some seconds on two cores
START_TIMEOUT = 300.0  # seconds
Answered = Callable[[int], Awaitable[int]]  # the number of a prompt -> tokens of its answers


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    cpu: float  # of one core


def configure(model: Path, address: str | None = None) -> Config:
    """That of the server, or of the worker that is attached to it at `address`."""
    generate: dict[str, Any] = {"group_size": SAMPLES, "sampling": {"max_new_tokens": TOKENS}}
    generate |= {"attach": (address,)} if address else {"server_args": {"max_total_tokens": 262_144}}
    return Config.model_validate({"model": {"path": model}, "task": {"name": "copy"}, "generate": generate})


@contextlib.asynccontextmanager
async def bare(config: Config, address: str, keys: EngineKeys) -> AsyncIterator[Answered]:
    """The same requests by a client of thirty lines."""
    tokenizer, task = Tokenizer(config.model.path), build_task(config.task.shares[0], config.run.seed, "train")
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": TOKENS, "n": SAMPLES}
    sampling["stop_token_ids"] = list(tokenizer.end_ids)
    headers = {"Authorization": f"Bearer {keys.api}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def ask(index: int) -> int:
            prompt = task.prompt(index)
            assert prompt.text is not None  # the task copy asks in plain text
            ids = tokenizer.prompt_ids(prompt.text).tolist()
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            async with session.post(f"{address}/generate", json=body) as response:
                return sum(len(answer["output_ids"]) for answer in orjson.loads(await response.read()))

        yield ask
    await task.close()


@contextlib.asynccontextmanager
async def worker(config: Config, folder: Path) -> AsyncIterator[Answered]:
    """Everything that a worker does between a ticket and the frames of its group."""
    events = EventLog(folder / "events.jsonl", "generator-0")
    fleet = Fleet(config.of_worker(0), folder, 0, events)
    tokenizer, load = Tokenizer(config.model.path), Load()
    task = build_task(config.task.shares[0], config.run.seed, "train")
    try:
        await fleet.start()

        async def make(index: int) -> int:
            ticket = Ticket(
                group_id=index,
                attempt=0,
                task="copy",
                prompt_index=index,
                seed=0,
                issued_version=PolicyVersion(0),
                deadline=0.0,
            )
            policy = fleet.policy(index, ticket.issued_version)
            inference = EngineInference(policy, tokenizer, config.generate, load)
            group = await run_group(
                ticket,
                task,
                inference,
                SAMPLES,
                longest=config.learner.tokens_per_micro_batch,
                temperature=1.0,
                overlong=Overlong.of(config),
                events=events,
            )
            fleet.leave(index)
            encode_group(group, config.stream.max_message)
            if any(sample.is_placeholder for sample in group.samples):
                raise RuntimeError(f"a sample has failed: {inference.failures[:1]}")
            return sum(len(sample.output_ids) for sample in group.samples)

        yield make
    finally:
        await fleet.close()
        await task.close()
        events.close()


async def run(answer: Answered, in_flight: int, groups: int) -> Run:
    """`groups` requests, so many of them at once."""
    numbers: Iterator[int] = iter(range(groups))

    async def one_after_another() -> int:
        return sum([await answer(number) for number in numbers])

    began, cpu = time.perf_counter(), time.process_time()
    tokens = sum(await asyncio.gather(*(one_after_another() for _ in range(in_flight))))
    seconds = time.perf_counter() - began
    return Run(tokens / seconds, (time.process_time() - cpu) / seconds)


async def measure(paths: dict[str, Answered], in_flight: int, groups: int, repeats: int) -> dict[str, Any]:
    """Medians and spreads of both paths; each goes first in turn."""
    for answer in paths.values():
        await run(answer, in_flight, max(2, groups // 4))
    runs: dict[str, list[Run]] = {name: [] for name in paths}
    for repeat in range(repeats):
        for name in sorted(paths, reverse=bool(repeat % 2)):
            runs[name].append(await run(paths[name], in_flight, groups))
    ratios = [mine.tokens_per_s / bares.tokens_per_s for mine, bares in zip(runs["worker"], runs["bare"], strict=True)]
    row: dict[str, Any] = {"in_flight": in_flight, "groups": groups}
    for name, each in runs.items():
        rates = [one.tokens_per_s for one in each]
        cpu = statistics.median(one.cpu for one in each)
        row[name] = {"tokens_per_s": statistics.median(rates), "spread": spread(rates), "cpu": cpu}
    return row | {"ratio": statistics.median(ratios), "ratio_spread": spread(ratios)}


def show(row: dict[str, Any]) -> None:
    mine, bares = row["worker"], row["bare"]
    print(
        f"{row['in_flight']:9d} {bares['tokens_per_s']:9.0f} ({bares['spread']:4.0%}) {mine['tokens_per_s']:9.0f}"
        f" ({mine['spread']:4.0%}) {row['ratio']:8.3f} ({row['ratio_spread']:4.0%}) {bares['cpu']:9.1%}"
        f" {mine['cpu']:9.1%}",
        flush=True,
    )


async def benchmark(model: Path, folder: Path, in_flights: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    config = configure(model)
    keys = engine_keys(config, folder)
    server = Server(config, folder, 0, keys)
    client = EngineClient(server.address, START_TIMEOUT, keys)
    try:
        await server.ready(client, START_TIMEOUT)
        attached = configure(model, server.address)
        print("in flight    bare tok/s         worker tok/s       of bare       CPU: bare    worker")
        rows = []
        async with bare(config, server.address, keys) as plain, worker(attached, folder) as ours:
            for in_flight in in_flights:
                rows.append(await measure({"bare": plain, "worker": ours}, in_flight, GROUPS[in_flight], repeats))
                show(rows[-1])
        return rows
    finally:
        await client.close()
        await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 in flight alone, without the bar")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; a tiny random model without it")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    in_flights, repeats = ((16,), 3) if options.quick else (IN_FLIGHT, 11)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = options.model or folder / "model"
        if options.model is None:
            tiny_model.make(model, 1)
        rows = uvloop.run(benchmark(model, folder, in_flights, repeats))
    missed = [row["in_flight"] for row in rows if row["ratio"] < BAR]
    judged = "not judged in its quick form" if options.quick else (f"missed at {missed}" if missed else "held")
    print(f"at least {BAR} of the bare client: {judged}")
    if options.json:
        report = {"benchmark": "generation", "bar": BAR, "repeats": repeats, "samples": SAMPLES, "rows": rows}
        options.json.write_text(json.dumps(report) + "\n")
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
