"""What becomes of the answers of a request that fails or is late, by a policy that only plays a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.engine.client import EngineError
from streamrl.generate.inference import EngineInference, Load, Policy
from streamrl.generate.requests import GroupPolicy, Place
from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.environment import Completion
from streamrl.types import PolicyVersion

LATE = EngineError("http://s", "/generate", None, "none in 600 s", late=True)
BROKEN = EngineError("http://s", "/generate", 500, "out of memory")
VERSION = PolicyVersion(0)


class OneServer:
    """The servers of a worker that has one."""

    def __init__(self, policy: Policy) -> None:
        self.place = Place("server-0", VERSION, policy)

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place:
        return self.place

    def changed(self) -> Awaitable[object]:
        return asyncio.sleep(0.01)


class Failing:
    """A server that gives these pieces, and then fails."""

    def __init__(self, error: EngineError, *pieces: Piece) -> None:
        self.error, self.pieces = error, pieces
        self.asked = 0

    async def generate(self, *request: Any, pieces: Callable[[Piece], None], **options: Any) -> list[Answer]:
        self.asked += 1
        for piece in self.pieces:
            pieces(piece)
        raise self.error

    async def abort(self, request_id: str = "") -> None: ...


class Silent:
    """A server that never says that it has ended a request."""

    def __init__(self, *, ends: bool) -> None:
        """`ends`: the request itself comes to its end then."""
        self._ends = ends
        self._ended = asyncio.Event()

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        await self._ended.wait()
        spans, reason = (WeightVersionSpan(str(VERSION), 0, 1),), FinishReason("abort")
        meta = AnswerMeta(id="a", finish_reason=reason, weight_versions=spans, output_token_logprobs=[(-1.0, 7, None)])
        return [Answer(output_ids=[7], meta_info=meta)]

    async def abort(self, request_id: str = "") -> None:
        if self._ends:
            self._ended.set()
        await asyncio.sleep(3600)


def piece(index: int, ids: list[int], finish: str | None = None) -> Piece:
    """The first one of an answer, and its last one with `finish`."""
    spans = (WeightVersionSpan(str(VERSION), 0, len(ids)),) if finish else ()
    logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
    reason = FinishReason(finish) if finish else None
    meta = PieceMeta("a", reason, spans, logprobs, completion_tokens=len(ids), weight_version=str(VERSION))
    return Piece(output_ids=ids, meta_info=meta, index=index)


def asked(policy: Policy, model: Path, n: int, seconds: float | None = None) -> tuple[list[Completion], list[str]]:
    """The completions of a request for `n` samples, and why some failed. `seconds`: until its deadline."""
    config = Config.model_validate({"model": {"path": model}, "generate": {"group_size": 4}}).generate

    async def run() -> tuple[list[Completion], list[str]]:
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        inference = EngineInference(policy, Tokenizer(model), config, Load(), deadline=deadline)
        async with asyncio.timeout(20):
            return await inference.generate("ab", n, max_new_tokens=8), inference.failures

    return asyncio.run(run())


def told(completions: list[Completion]) -> list[tuple[list[int], str, str]]:
    return [(each.output_ids.tolist(), each.finish_reason, each.failure) for each in completions]


def test_a_request_that_fails_in_the_middle_costs_the_answers_that_had_not_come_to_their_end(model_folders):
    server = Failing(BROKEN, piece(0, [7, 8], "stop"), piece(1, [5]), piece(2, [3, 4, 6], "length"))
    completions, failures = asked(GroupPolicy(OneServer(server), "group", VERSION, 2), model_folders[0], 4)
    assert told(completions) == [
        ([7, 8], "stop", ""),
        ([5], "abort", "server"),
        ([3, 4, 6], "length", ""),
        ([], "abort", "server"),
    ]
    assert failures == [str(BROKEN)]
    assert server.asked == 1


def test_a_request_that_fails_before_a_token_costs_its_answers(model_folders):
    policy = GroupPolicy(OneServer(Failing(BROKEN)), "group", VERSION, 2)
    completions, failures = asked(policy, model_folders[0], 2)
    assert told(completions) == [([], "abort", "server")] * 2
    assert failures == [str(BROKEN)]


def test_a_server_that_is_always_late_costs_the_answers_at_their_deadline(model_folders):
    policy = GroupPolicy(OneServer(Failing(LATE)), "group", VERSION, 2)
    completions, failures = asked(policy, model_folders[0], 2, seconds=0.2)
    assert told(completions) == [([], "abort", "deadline")] * 2
    assert failures == ["not finished at the deadline"]


@pytest.mark.parametrize(("ends", "reached"), [(True, [7]), (False, [])])
def test_a_server_that_does_not_answer_at_the_deadline_holds_a_request_no_longer_than_it_may(
    model_folders, monkeypatch, ends, reached
):
    monkeypatch.setattr("streamrl.generate.inference.CUT_TIMEOUT", 0.2)
    completions, failures = asked(Silent(ends=ends), model_folders[0], 1, seconds=0.05)
    assert told(completions) == [(reached, "abort", "deadline")]
    assert failures == ["not finished at the deadline"]
