"""`python -m benchmarks.publish --servers`: what an update costs a real SGLang server under load, and what it breaks.

One server with a tiny model answers LOAD requests at a time, each sent and continued as a worker does it, while
versions of two sets of weights come in turn. A row has, of all its updates:

    still           ms from the order to pause until the server goes on, p50 and p95
    update          ms from the worker's first move (closing the gate included) until the new version is in use
    lost            tokens that were asked for and did not come
    error           largest difference of an exact token's log-prob and Hugging Face's by the weights of its version
    inexact         tokens that an update in place left inexact, and the largest difference of those that were compared

First each interruption mode with `memory`, then each other transport with `retract`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch import tiny_model
from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient, Interruption
from streamrl.engine.server import Server
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.requests import GroupPolicy, Place
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.sources import make_source, make_staging
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

LOAD = 16  # requests in flight
TOKENS = 200  # of an answer
PAUSE = 0.3  # seconds between two updates
TIMEOUT = 120.0  # seconds of one call
START = 300.0  # seconds that the server may take to start
CHECKED = 32  # answers of a row that are compared, those of the most versions first
ERROR_BAR = 1e-4
STATE = ServerState(name="server-0", version=PolicyVersion(0))
ROWS = [*(("memory", mode) for mode in ("retract", "in_place", "abort", "drain"))]
ROWS += [(transport, "retract") for transport in ("broadcast", "disk", "delta")]

Weights = dict[str, torch.Tensor]
Asked = tuple[list[int], Answer]


class TimedClient(EngineClient):
    """Records how long the server is paused."""

    def __init__(self, address: str) -> None:
        super().__init__(address, TIMEOUT)
        self.still: list[float] = []
        self._paused = 0.0

    async def pause(self, mode: Interruption, timeout: float) -> None:
        self._paused = time.perf_counter()
        await super().pause(mode, timeout)

    async def resume(self, timeout: float) -> None:
        await super().resume(timeout)
        self.still.append(time.perf_counter() - self._paused)


@dataclass
class One:
    """The one server, as requests choose it."""

    policy: GatedPolicy
    keeps_cache: bool
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0))

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place | None:
        return Place("server-0", self.version, self.policy, self.keeps_cache) if self.version >= floor else None

    async def changed(self) -> None:
        await asyncio.sleep(0.01)


def make_models(folder: Path) -> tuple[Path, Path]:
    """Two tiny models of one shape, sharp enough to tell them apart by any token."""
    for seed in (1, 2):
        tiny_model.make(folder / str(seed), seed)
        file = folder / str(seed) / "model.safetensors"
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return folder / "1", folder / "2"


def config_of(model: Path, transport: str, mode: str) -> Config:
    publish = {"transport": transport, "interruption": mode, "timeout": TIMEOUT}
    return Config.model_validate({"model": {"path": model}, "publish": publish, "stream": {"curve": "off"}})


async def load(server: One, answers: list[Asked], stop: asyncio.Event, number: int) -> None:
    """One request after another, until `stop`; the last one ends as well."""
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for count in itertools.count():
        if stop.is_set():
            return
        prompt = [1 + number % 8, 1 + count % 8, 3, 2]
        policy = GroupPolicy(server, (number, count), PolicyVersion(0), 0)
        answers += [(prompt, answer) for answer in await policy.generate(prompt, sampling, 1)]


async def measure(
    address: str, models: tuple[Path, Path], transport: str, mode: str, updates: int
) -> tuple[list[float], list[float], list[Asked]]:
    """Seconds that the server was paused and that each update took, and all that was answered."""
    config = config_of(models[0], transport, mode)
    weights = [load_file(model / "model.safetensors") for model in models]
    client, gate = TimedClient(address), RequestGate()
    await client.update_from_disk(str(models[0]), "0.0")
    server, sink = One(GatedPolicy(client, gate), mode == "in_place"), make_sink(config, client, gate)
    staging = make_staging(config)
    answers: list[Asked] = []
    stop = asyncio.Event()
    tasks = [asyncio.create_task(load(server, answers, stop, number)) for number in range(LOAD)]
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(config, Path(folder), "tcp://127.0.0.1:1")
        try:
            for step in range(1, updates + 1):
                await asyncio.sleep(PAUSE)
                staged = staging.fill(PolicyVersion(step), weights[step % 2].items())
                manifest = source.manifest(STATE, staged)
                began = time.perf_counter()
                sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
                await asyncio.gather(sending, sink.apply(staged.version, manifest))
                took.append(time.perf_counter() - began)
                server.version = staged.version
        finally:
            stop.set()
            await asyncio.gather(*tasks)
            source.close()
            await client.close()
    return client.still, took, answers


def forward_of(model: Path) -> Callable[[Weights, list[int]], torch.Tensor]:
    """Log-probs of the tokens behind the first, by Hugging Face."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def forward(weights: Weights, ids: list[int]) -> torch.Tensor:
        policy.load_state_dict(weights, strict=False)
        policy.tie_weights()
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(tokens).logits[0, :-1], -1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0]

    return forward


def errors_of(answers: list[Asked], weights: list[Weights], forward: Callable[..., torch.Tensor]) -> dict[bool, float]:
    """The largest over the checked answers, of exact tokens (True) and of others (False)."""
    worst = {True: 0.0, False: 0.0}
    for prompt, answer in sorted(answers, key=lambda asked: -len(asked[1].meta_info.weight_versions))[:CHECKED]:
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        for span in answer.meta_info.weight_versions:
            of = weights[PolicyVersion.parse(span.version).step % 2]
            expected = forward(of, [*prompt, *answer.output_ids])[len(prompt) - 1 :]
            error = float((expected - reported)[span.start : span.end].abs().max())
            worst[span.exact] = max(worst[span.exact], error)
    return worst


def row_of(transport: str, mode: str, still: list[float], took: list[float], answers: list[Asked]) -> dict[str, Any]:
    return {
        "transport": transport,
        "interruption": mode,
        "updates": len(took),
        "answers": len(answers),
        "spanning": sum(len(answer.meta_info.weight_versions) > 1 for _, answer in answers),
        "still_p50_ms": 1e3 * statistics.median(still),
        "still_p95_ms": 1e3 * statistics.quantiles(still, n=20)[-1],
        "update_p50_ms": 1e3 * statistics.median(took),
        "update_p95_ms": 1e3 * statistics.quantiles(took, n=20)[-1],
        "lost": sum(TOKENS - len(answer.meta_info.output_token_logprobs) for _, answer in answers),
        "inexact": sum(
            span.end - span.start
            for _, answer in answers
            for span in answer.meta_info.weight_versions
            if not span.exact
        ),
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['transport']:10s} {row['interruption']:9s} {row['still_p50_ms']:8.1f} {row['still_p95_ms']:8.1f}"
        f" {row['update_p50_ms']:8.1f} {row['update_p95_ms']:8.1f} {row['answers']:8d} {row['spanning']:9d}"
        f" {row['lost']:6d} {row['error']:10.1e} {row['inexact']:8d} {row['error_inexact']:10.1e}",
        flush=True,
    )


def judge(rows: list[dict[str, Any]]) -> bool:
    lost = sum(row["lost"] for row in rows)
    error = max(row["error"] for row in rows)
    strange = sum(row["inexact"] for row in rows if row["interruption"] != "in_place")
    print(f"tokens lost: {lost}, bar 0: {'held' if lost == 0 else 'MISSED'}")
    print(
        f"largest error of exact tokens: {error:.1e}, bar {ERROR_BAR:g}: {'held' if error <= ERROR_BAR else 'MISSED'}"
    )
    print(f"inexact tokens but for in_place: {strange}, bar 0: {'held' if strange == 0 else 'MISSED'}")
    return lost == strange == 0 and error <= ERROR_BAR


def servers(quick: bool) -> tuple[list[dict[str, Any]], bool]:
    """All rows, and whether the bars are held."""
    updates = 6 if quick else 40
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        weights = [load_file(model / "model.safetensors") for model in models]
        forward = forward_of(models[0])
        server = Server(config_of(models[0], "memory", "retract"), Path(folder), index=0)
        try:
            asyncio.run(_ready(server))
            print(f"{LOAD} requests of {TOKENS} tokens in flight, {updates} updates a row")
            print(
                "transport  mode      still p50      p95 upd. p50      p95  answers  spanning   lost      error"
                "  inexact      error"
            )
            rows = []
            for transport, mode in ROWS:
                still, took, answers = asyncio.run(measure(server.address, models, transport, mode, updates))
                rows.append(row_of(transport, mode, still, took, answers))
                errors = errors_of(answers, weights, forward)
                rows[-1] |= {"error": errors[True], "error_inexact": errors[False]}
                show(rows[-1])
        finally:
            asyncio.run(server.stop())
    return rows, judge(rows)


async def _ready(server: Server) -> None:
    client = EngineClient(server.address, TIMEOUT)
    try:
        await server.ready(client, START)
    finally:
        await client.close()
