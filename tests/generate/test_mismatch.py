"""A real server against the learner's scores: with the same weights, with others, and when another version comes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import PrefillScores
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.generate.mismatch import MismatchMeter
from streamrl.observe.events import EventLog, read_events
from streamrl.observe.limits import LIMITS
from streamrl.observe.mismatch import excess
from streamrl.stream.messages import Message, Mismatch, Publish, ScoredAnswer
from streamrl.types import PolicyVersion

PROMPT = [1, 4, 2, 8]
VERSION = PolicyVersion(3)


@pytest.fixture
def scored(model_folders: tuple[Path, Path], forward_logprobs: Any) -> tuple[ScoredAnswer, ...]:
    """Answers with scores by the first model, and former ones by the second."""
    first, second = (load_file(folder / "model.safetensors") for folder in model_folders)
    random, answers = np.random.default_rng(3), []
    for length in (3, 6, 9, 12, 12):
        ids = [*PROMPT, *random.integers(0, 10, length).tolist()]
        trained = [0, *range(2, length)]
        published, former = (forward_logprobs(weights, ids)[len(PROMPT) - 1 :].numpy() for weights in (first, second))
        answers.append(
            ScoredAnswer(
                ids=ids,
                prompt=len(PROMPT),
                trained=trained,
                logprobs=published[trained].tolist(),
                former=former[trained].tolist(),
            )
        )
    return tuple(answers)


def measured(
    server: Server, folder: Path, scored: tuple[ScoredAnswer, ...], events: Path, *, named: str, dtype: str = "float32"
) -> tuple[list[Message], list[dict[str, Any]]]:
    """What is sent, and the event, of a server with the weights of `folder`, which it calls by that name."""
    config = Config.model_validate({"model": {"path": folder, "dtype": dtype}})
    sent: list[Message] = []

    async def send(message: Message) -> bool:
        sent.append(message)
        return True

    async def run() -> None:
        client = EngineClient(server.address, timeout=60)
        log = EventLog(events, "generator-0")
        meter = MismatchMeter(config, log, send)
        try:
            await client.update_from_disk(str(folder), named)
            for _ in range(3):
                meter.begin(Publish(server="server-0", version=VERSION, manifest={}, scored=scored), client)
                await asyncio.wait_for(meter._task, 60)
        finally:
            meter.close()
            log.close()
            await client.close()

    asyncio.run(run())
    told = [event for event in read_events(events) if event["event"] == "mismatch" and event["phase"] == "end"]
    return sent, told


def test_a_server_with_the_published_weights_is_as_near_as_rounding_allows(
    fresh_server, model_folders, scored, tmp_path
):
    sent, told = measured(fresh_server, model_folders[0], scored, tmp_path / "e.jsonl", named=str(VERSION))
    assert len(sent) == len(told) == 3
    (message, *_) = sent
    assert isinstance(message, Mismatch)
    assert (message.server, message.version, message.metrics["mismatch/step"]) == ("server-0", VERSION, 3)
    assert message.metrics["mismatch/limit"] == LIMITS["float32"].mean
    assert "mismatch/rounding" not in message.metrics  # of float32 a limit knows
    assert abs(message.metrics["mismatch/slope"]) < 1e-3
    assert excess(message.metrics) < 1


def test_a_server_with_the_weights_of_before_is_told_by_limit_and_by_slope(
    fresh_server, model_folders, scored, tmp_path
):
    sent, _ = measured(fresh_server, model_folders[1], scored, tmp_path / "e.jsonl", named=str(VERSION))
    metrics = sent[0].metrics
    assert metrics["mismatch/mean"] > metrics["mismatch/limit"]
    assert metrics["mismatch/slope"] == pytest.approx(1, abs=1e-3)
    assert excess(metrics) > 1


def test_what_another_version_has_scored_is_not_compared(fresh_server, model_folders, scored, tmp_path):
    sent, told = measured(fresh_server, model_folders[0], scored, tmp_path / "e.jsonl", named="4.0")
    assert sent == []
    assert {event["failed"] for event in told} == {"version 4.0 has scored tokens"}


class Broken:
    """A server that scores as it should, or does not, and never draws."""

    def __init__(self, *, scores: bool) -> None:
        self.scores = scores

    async def score(self, ids: Sequence[int], start: int) -> PrefillScores:
        if not self.scores:
            raise ValueError("no such place")
        return PrefillScores([-1.0] * (len(ids) - start), str(VERSION))

    async def generate(self, *request: Any) -> list[Any]:
        raise ValueError("no such sampling")


def measured_by(policy: Broken, config: Config, events: Path) -> list[Message]:
    """What is sent of one answer."""
    answer = ScoredAnswer(ids=[*PROMPT, 5, 6], prompt=len(PROMPT), trained=[0, 1], logprobs=[-1, -1], former=[-1, -2])
    sent: list[Message] = []

    async def send(message: Message) -> bool:
        sent.append(message)
        return True

    async def run() -> None:
        with contextlib.closing(EventLog(events, "generator-0")) as log:
            meter = MismatchMeter(config, log, send)
            meter.begin(Publish(server="server-0", version=VERSION, manifest={}, scored=(answer,)), policy)
            await meter._task

    asyncio.run(run())
    return sent


@pytest.mark.parametrize(
    ("scores", "failed", "said"),
    [(False, "ValueError: no such place", "mismatch"), (True, None, "rounding")],
    ids=["a score", "the rounding"],
)
def test_a_measurement_that_meets_a_defect_tells_it(
    scores: bool, failed: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = Config.model_validate({"model": {"dtype": "bfloat16"}})
    sent = measured_by(Broken(scores=scores), config, tmp_path / "e.jsonl")
    (told,) = [event for event in read_events(tmp_path / "e.jsonl") if event.get("phase") == "end"]
    assert (told.get("failed"), len(sent)) == (failed, scores)
    (line,) = [record.getMessage() for record in caplog.records if record.exc_info]
    assert line.startswith(f"the {said} of server-0")


class NoNumbers(Broken):
    """A server whose weights are no numbers."""

    async def score(self, ids: Sequence[int], start: int) -> PrefillScores:
        return PrefillScores([math.nan] * (len(ids) - start), str(VERSION))


def test_a_server_whose_log_probs_are_no_numbers_is_told_as_infinitely_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    sent = measured_by(NoNumbers(scores=True), Config(), tmp_path / "e.jsonl")
    assert sent[0].metrics["mismatch/infinite"] == 1
    assert math.isinf(excess(sent[0].metrics))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("server-0 is too far from the learner")


def test_where_bfloat16_is_asked_for_the_limit_is_that_of_decode_and_prefill_once_enough_tokens_are_drawn(
    fresh_server, model_folders, scored, tmp_path
):
    """The server computes in float32: what counts here is which limit holds."""
    more = scored * 4
    sent, _ = measured(fresh_server, model_folders[0], more, tmp_path / "e.jsonl", named=str(VERSION), dtype="bfloat16")
    first, second, third = (message.metrics for message in sent)
    assert first["mismatch/limit"] == LIMITS["bfloat16"].mean
    assert "mismatch/rounding" not in first
    assert 0 < second["mismatch/rounding"] < 1e-5
    assert second["mismatch/limit"] == pytest.approx(10 * second["mismatch/rounding"])
    assert third["mismatch/limit"] == second["mismatch/limit"]
