"""How far the log-probs of a server are from the learner's with the same weights, and what a prefill of them costs.

    python -m benchmarks.mismatch [--quick] [--model FOLDER] [--json PATH]

    decode         `generate.score: decode`: log-probs as the tokens were drawn
    prefill        `generate.score: prefill`: those of one prefill of each finished answer
    full_prefill   `generate.score: full_prefill`: of one that uses nothing cached; the learner is `learner.as_served`

One real SGLang server a dtype answers groups of 16 for three workers, one a way; the learner scores what they made.
`equal` is the share of tokens whose log ratio to the learner is exactly 0. The workers take turns, so that a noisy
machine slows all; the cost is the quotient of a repeat's tokens/s and that of decode, its median over the repeats with
its smallest and largest. The learner's is that of its passes over the same groups, as served and not, in turns.
`decode - prefill` compares the two for the same answers: what `streamrl/observe/limits.py` derives the limit of
`mismatch/mean` from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.suite import this_machine
from launch import tiny_model
from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.engine.server import serving
from streamrl.generate.fleet import Fleet
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.tokenizer import Tokenizer
from streamrl.lab.output import output_file
from streamrl.learner.trainer import Trainer
from streamrl.observe.events import EventLog
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.registry import build_task
from streamrl.types import Batch, Group, PolicyVersion, Ticket

DTYPES = ("float32", "bfloat16")
WAYS = ("decode", "prefill", "full_prefill")
SAMPLES = 16  # n
TOKENS = 64  # of an answer, unless it ends before
SYMBOLS = 26  # of the tiny model: its answers end seldom
GROUPS = 32  # of a run, all at once
LEARNER = 8192  # tokens of a row


@dataclass(frozen=True, slots=True)
class Distance:
    """|log ratio| of two scores of the same tokens, in nats."""

    tokens: int
    equal: float  # share
    mean: float
    largest: float

    @classmethod
    def of(cls, some: np.ndarray, others: np.ndarray) -> Distance:
        found = np.abs(np.float64(some) - others)
        return cls(len(found), float(np.mean(found == 0)), float(found.mean()), float(found.max()))


class Made:
    """A worker's way from a ticket to its group, on a running server."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._events = EventLog(folder / f"{config.generate.score}.jsonl", "generator-0")
        self._fleet = Fleet(config.of_worker(0), folder, 0, self._events)
        self._tokenizer = Tokenizer(config.model.path)
        self._task = build_task(config.task.shares[0], config.run.seed, "train")

    async def start(self) -> None:
        await self._fleet.start()

    async def close(self) -> None:
        await self._fleet.close()
        await self._task.close()
        self._events.close()

    async def group(self, index: int) -> Group:
        """Raises RuntimeError where an answer failed, or kept the log-probs of decode."""
        ticket = Ticket(
            group_id=index,
            task="copy",
            prompt_index=index,
            seed=0,
            issued_version=PolicyVersion(0),
            deadline=0.0,
        )
        policy = self._fleet.policy(index, ticket.issued_version)
        inference = EngineInference(policy, self._tokenizer, self._config.generate, Load())
        made = await run_group(
            ticket,
            self._task,
            inference,
            SAMPLES,
            longest=LEARNER,
            temperature=1.0,
            overlong=Overlong.of(self._config),
            events=self._events,
        )
        self._fleet.leave(index)
        if inference.failures or inference.decoded:
            raise RuntimeError(f"{inference.decoded} answers by decode, failures: {inference.failures[:1]}")
        return made

    async def run(self, groups: int) -> tuple[list[Group], float]:
        """So many groups at once, and the tokens/s."""
        began = time.perf_counter()
        made = await asyncio.gather(*(self.group(index) for index in range(groups)))
        return made, sum(group.tokens for group in made) / (time.perf_counter() - began)


def configure(model: Path, dtype: str, score: str, address: str | None = None) -> Config:
    """That of the server, or of a worker that is attached to it at `address`."""
    generate: dict[str, Any] = {"group_size": SAMPLES, "sampling": {"max_new_tokens": TOKENS}, "score": score}
    generate |= {"attach": (address,)} if address else {"server_args": {"max_total_tokens": 262_144}}
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "task": {"name": "copy"},
            "generate": generate,
            "learner": {"tokens_per_micro_batch": LEARNER, "as_served": score == "full_prefill"},
            "stream": {"curve": "off"},
        }
    )


async def generate(
    address: str, configs: dict[str, Config], folder: Path, groups: int, repeats: int
) -> tuple[dict[str, list[Group]], dict[str, list[float]], Distance]:
    """The groups of each way, the quotients of its speed and decode's, and how far decode is from prefill."""
    workers = {way: Made(config, folder) for way, config in configs.items()}
    client = EngineClient(address, 600.0)
    try:
        for worker in workers.values():
            await worker.start()
            await worker.run(max(2, groups // 4))
        ratios: dict[str, list[float]] = {way: [] for way in WAYS}
        made = dict[str, list[Group]]()
        for repeat in range(repeats):
            speeds = {}
            for way in in_turns(WAYS, repeat):
                made[way], speeds[way] = await workers[way].run(groups)
            for way in WAYS:
                ratios[way].append(speeds[way] / speeds["decode"])
        return made, ratios, await apart(client, made["decode"])
    finally:
        await client.close()
        for worker in workers.values():
            await worker.close()


async def apart(client: EngineClient, groups: Sequence[Group]) -> Distance:
    """Decode's log-probs against those of a prefill of the same answers."""
    samples = [sample for group in groups for sample in group.samples]
    ids = [[*sample.prompt_ids.tolist(), *sample.output_ids.tolist()] for sample in samples]
    found = await asyncio.gather(
        *(client.score(each, len(sample.prompt_ids)) for each, sample in zip(ids, samples, strict=True))
    )
    decoded = np.concatenate([sample.logprobs for sample in samples])
    return Distance.of(decoded, np.concatenate([np.array(each.logprobs, np.float32) for each in found]))


def in_turns(ways: Sequence[str], repeat: int) -> list[str]:
    """Each goes first once in so many repeats."""
    first = repeat % len(ways)
    return [*ways[first:], *ways[:first]]


@contextmanager
def learner(config: Config) -> Iterator[Trainer]:
    """The only one of this process for the time being: torch's process group is."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder))
        try:
            trainer.restore_or_start()
            yield trainer
        finally:
            trainer.close()


def learned(trainer: Trainer, groups: Sequence[Group]) -> Distance:
    """The learner's log-probs against those of the groups."""
    batch = Batch(step=0, groups=tuple(groups))
    recorded = np.concatenate([sample.logprobs[sample.loss_mask] for sample in batch.samples])
    return Distance.of(trainer.score(batch), recorded)


def passes(usual: Config, as_served: Config, groups: Sequence[Group], repeats: int) -> list[float]:
    """Tokens/s as served over those of the usual rows, of scoring the same groups; learners take turns."""
    batch, ratios = Batch(step=0, groups=tuple(groups)), []
    for repeat in range(repeats):
        seconds = {}
        for config in (usual, as_served) if repeat % 2 else (as_served, usual):
            with learner(config) as trainer:
                trainer.score(batch)  # warms up
                began = time.perf_counter()
                trainer.score(batch)
                seconds[config.learner.as_served] = time.perf_counter() - began
        ratios.append(seconds[False] / seconds[True])
    return ratios


def benchmark(model: Path, dtype: str, folder: Path, groups: int, repeats: int) -> dict[str, Any]:
    with serving(configure(model, dtype, "full_prefill"), folder) as server:
        workers = {way: configure(model, dtype, way, server.address) for way in WAYS}
        made, ratios, rounding = uvloop.run(generate(server.address, workers, folder, groups, repeats))
    configs = {way: configure(model, dtype, way) for way in WAYS}
    distances = {}
    for way, config in configs.items():
        with learner(config) as trainer:
            distances[way] = learned(trainer, made[way])
    return {
        "dtype": dtype,
        **{way: asdict(distance) for way, distance in distances.items()},
        "decode - prefill": asdict(rounding),
        "speed": {way: _spread(each) for way, each in ratios.items() if way != "decode"},
        "learner": _spread(passes(configs["decode"], configs["full_prefill"], made["decode"], repeats)),
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def show(row: dict[str, Any]) -> None:
    for name in (*WAYS, "decode - prefill"):
        found = row[name]
        speed = _told(row["speed"][name]) if name in row["speed"] else ""
        if name == "full_prefill":
            speed += f"  {_told(row['learner'])}"
        print(
            f"{row['dtype']:9} {name:16} {found['tokens']:7d} {found['equal']:7.2%} {found['mean']:10.3g} "
            f"{found['largest']:10.3g}  {speed}",
            flush=True,
        )


def _told(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer groups and repeats")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; a tiny random model without it")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    groups, repeats = (8, 3) if options.quick else (GROUPS, 7)
    rows = []
    print("dtype     log-probs        tokens   equal       mean    largest  tokens/s of decode's  of the learner's")
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if options.model is None:
            tiny_model.make(model, 1, SYMBOLS)
        for dtype in DTYPES:
            folder = Path(scratch) / dtype
            folder.mkdir()
            rows.append(benchmark(model, dtype, folder, groups, repeats))
            show(rows[-1])
    if options.json:
        ratios = [
            {"name": f"{name} of decode, {row['dtype']}", **speed}
            for row in rows
            for name, speed in (*row["speed"].items(), ("learner as served", row["learner"]))
        ]
        machine = f"{this_machine().processor}, {this_machine().cores} cores"
        report = {"benchmark": "mismatch", "machine": machine, "repeats": repeats, "samples": SAMPLES}
        report |= {"rows": rows, "ratios": ratios}
        options.json.write_text(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
