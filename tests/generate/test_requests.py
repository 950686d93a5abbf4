"""`publish.interruption: abort`: at a real SGLang server, every answer comes back whole and every token is exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.client import Answer, AnswerMeta, EngineClient, EngineError, FinishReason, WeightVersionSpan
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.requests import STALLS, ContinuingPolicy
from streamrl.generate.sinks import make_sink
from streamrl.publish.sources import make_source
from streamrl.publish.staging import Staging
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8]]
TOKENS = 300
SAMPLING = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
UPDATES = 2


def test_answers_that_updates_cut_off_go_on_from_their_last_token(
    fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor], tmp_path
):
    publishing = {"transport": "broadcast", "interruption": "abort", "timeout": TIMEOUT, "bucket": 1 << 16}
    config = Config.model_validate({"model": {"path": model_folders[0]}, "publish": publishing})
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]

    async def run() -> list[list[Answer]]:
        client, gate = EngineClient(fresh_server.address, TIMEOUT), RequestGate()
        policy, sink = ContinuingPolicy(GatedPolicy(client, gate)), make_sink(config, client, gate)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        try:
            tasks = [asyncio.create_task(policy.generate(prompt, SAMPLING, n)) for n, prompt in enumerate(PROMPTS, 1)]
            for step in range(1, UPDATES + 1):
                await asyncio.sleep(0.3)
                staged = Staging(1 << 16).fill(PolicyVersion(step), weights[step % 2].items())
                manifest = source.manifest(STATE, staged)
                sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
                await asyncio.gather(sending, sink.apply(staged.version, manifest))
            return await asyncio.gather(*tasks)
        finally:
            source.close()
            await client.close()

    groups = asyncio.run(run())
    assert [len(answers) for answers in groups] == [1, 2, 3]
    versions = set()
    for prompt, answers in zip(PROMPTS, groups, strict=True):
        for answer in answers:
            assert len(answer.output_ids) == TOKENS
            assert answer.meta_info.finish_reason.type == "length"
            reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
            spans = answer.meta_info.weight_versions
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            assert spans[-1].end == TOKENS
            assert list(spans) == sorted(spans, key=lambda span: span.version)
            for span in spans:
                of = weights[PolicyVersion.parse(span.version).step % 2]
                expected = forward_logprobs(of, [*prompt, *answer.output_ids])[len(prompt) - 1 :]
                assert (expected - reported)[span.start : span.end].abs().max() < 1e-4
            versions |= {span.version for span in spans}
    assert len(versions) > 1, "nothing was cut"


class Script:
    """A policy that answers as it is told, and notes what it was asked for."""

    def __init__(self, *said: Answer | EngineError) -> None:
        self.said = list(said)
        self.asked: list[tuple[list[int], int]] = []
        self.ended: list[str] = []

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        self.asked.append((list(input_ids), sampling["max_new_tokens"]))
        said = self.said.pop(0)
        if isinstance(said, EngineError):
            raise said
        return [said] * n

    async def abort(self, request_id: str = "") -> None:
        self.ended.append(request_id)


def answer(ids: list[int], finish: str) -> Answer:
    spans = (WeightVersionSpan("1.0", 0, len(ids)),)
    logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
    meta = AnswerMeta(id="a", finish_reason=FinishReason(finish), weight_versions=spans, output_token_logprobs=logprobs)
    return Answer(output_ids=ids, meta_info=meta)


def ask(script: Script, *, end: str = "") -> Answer:
    async def run() -> Answer:
        policy = ContinuingPolicy(script)
        if end:
            await policy.abort(end)
        (whole,) = await policy.generate([1, 2], {"max_new_tokens": 6}, 1, "request")
        return whole

    return asyncio.run(run())


def test_a_request_that_was_ended_by_its_id_is_not_asked_for_again():
    script = Script(answer([7], "abort"))
    whole = ask(script, end="request")
    assert (whole.output_ids, whole.meta_info.finish_reason.type) == ([7], "abort")
    assert (script.ended, len(script.asked)) == (["request"], 1)


def test_a_request_that_never_brings_a_token_is_given_up():
    script = Script(answer([7], "abort"), *[answer([], "abort")] * (STALLS + 5))
    assert ask(script).meta_info.finish_reason.type == "abort"
    assert script.asked == [([1, 2], 6), *[([1, 2, 7], 5)] * STALLS]


def test_a_rest_that_the_server_refuses_leaves_an_abort_and_a_lost_server_is_told():
    refused = EngineError("http://s", "/generate", 400, "too long")
    assert ask(Script(answer([7, 8], "abort"), refused)).output_ids == [7, 8]
    with pytest.raises(EngineError, match="no answer"):
        ask(Script(answer([7, 8], "abort"), EngineError("http://s", "/generate", None, "refused")))
