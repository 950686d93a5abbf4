"""`generate.score: prefill` at a real SGLang server: whose log-probs an answer has, and when decode's stay."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Hashable, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from streamrl.config import Config
from streamrl.engine.answers import Answer, PrefillScores
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.inference import ServerPolicy
from streamrl.generate.requests import GroupPolicy, Place
from streamrl.generate.served import check_prefills
from streamrl.types import PolicyVersion

PROMPT = [1, 4, 2, 8]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
TIMEOUT = 60.0


class One:
    """A single server, which reports version 0."""

    def __init__(self, policy: ServerPolicy) -> None:
        self._policy = policy

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place:
        return Place("a", PolicyVersion(0), self._policy, scores=self._policy)

    def changed(self) -> Awaitable[object]:
        return asyncio.sleep(TIMEOUT)


class Client(EngineClient):
    """Keeps what its server has answered to prefills, and does something `before` each."""

    def __init__(self, address: str) -> None:
        super().__init__(address, TIMEOUT)
        self.prefilled: dict[tuple[int, ...], list[float]] = {}

    async def before(self) -> None: ...

    async def score(self, input_ids: Sequence[int], start: int, *further: Any, **options: Any) -> PrefillScores:
        await self.before()
        found = await super().score(input_ids, start, *further, **options)
        self.prefilled[tuple(input_ids)] = found.logprobs
        return found


def answers_of(
    address: str,
    kind: type[Client] = Client,
    *,
    n: int = 4,
    every: int = 0,
    by_prefill: bool = True,
    cached: bool = True,
    **sampling: Any,
) -> tuple[list[Answer], Client]:
    async def run() -> tuple[list[Answer], Client]:
        client = kind(address)
        policy = GroupPolicy(One(client), 0, PolicyVersion(0), every, by_prefill=by_prefill, cached=cached)
        try:
            answers = await asyncio.wait_for(policy.generate(PROMPT, SAMPLING | sampling, n, "r"), TIMEOUT)
        finally:
            await client.close()
        return answers, client

    return asyncio.run(run())


def logprobs(answer: Answer) -> list[float]:
    assert [entry[1] for entry in answer.meta_info.output_token_logprobs] == answer.output_ids
    return [entry[0] for entry in answer.meta_info.output_token_logprobs]


@pytest.mark.parametrize(("n", "every"), [(4, 0), (4, 5), (1, 0)], ids=["at once", "in pieces", "single"])
def test_a_finished_answer_has_the_log_probs_of_its_prefill(fresh_server, n, every):
    answers, client = answers_of(fresh_server.address, n=n, every=every)
    assert len(answers) == n
    for answer in answers:
        assert answer.meta_info.by_prefill
        assert len(answer.output_ids) == 24
        assert logprobs(answer) == client.prefilled[(*PROMPT, *answer.output_ids)]
        assert [(span.version, span.start, span.end) for span in answer.meta_info.weight_versions] == [("0.0", 0, 24)]


def test_they_are_nearly_those_of_decode_and_not_always_the_same(fresh_server):
    (plain,), client = answers_of(fresh_server.address, n=1, by_prefill=False)
    assert not plain.meta_info.by_prefill
    assert client.prefilled == {}

    async def score() -> PrefillScores:
        again = Client(fresh_server.address)
        try:
            return await again.score([*PROMPT, *plain.output_ids], len(PROMPT))
        finally:
            await again.close()

    scores = asyncio.run(score())
    assert scores.logprobs == pytest.approx(logprobs(plain), abs=3e-5)  # another kernel rounds otherwise
    assert scores.logprobs != logprobs(plain)


def test_a_full_prefill_computes_the_prompt_again(fresh_server):
    class Counting(Client):
        cached: ClassVar[list[int]] = []

        async def _post(self, path: str, body: Any, *further: Any, **options: Any) -> bytes:
            found = await super()._post(path, body, *further, **options)
            if path == "/generate" and body["sampling_params"]["max_new_tokens"] == 0:
                self.cached.append(json.loads(found)["meta_info"]["cached_tokens"])
            return found

    for cached in (True, False):
        Counting.cached.clear()
        answers, client = answers_of(fresh_server.address, Counting, cached=cached)
        assert all(answer.meta_info.by_prefill for answer in answers)
        assert [len(each) for each in client.prefilled.values()] == [24] * len(client.prefilled)
        assert len(Counting.cached) == 4
        assert all((count > 0) == cached for count in Counting.cached)


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "whole"), [({}, True), ({"chunked_prefill_size": 64}, False)], ids=["whole", "cut"])
def test_a_full_prefill_is_the_same_among_many_unless_it_is_cut(chunks, whole, serving, model_folders, tmp_path):
    config = Config.model_validate(
        {
            "model": {"path": model_folders[0], "dtype": "float32"},
            "generate": {"score": "full_prefill", "server_args": {"max_prefill_tokens": 64, **chunks}},
        }
    )
    drawn = random.Random(0)
    answers = [[drawn.randrange(1, 9) for _ in range(drawn.randrange(20, 50))] for _ in range(40)]

    async def score(address: str) -> tuple[list[PrefillScores], list[PrefillScores]]:
        client = EngineClient(address, TIMEOUT)
        try:
            alone = [await client.score(each, 1, cached=False) for each in answers]
            return alone, await asyncio.gather(*(client.score(each, 1, cached=False) for each in answers))
        finally:
            await client.close()

    with serving(config, tmp_path) as server:
        alone, together = asyncio.run(score(server.address))
    assert (alone == together) == whole
    for some, others in zip(alone, together, strict=True):
        assert some.logprobs == pytest.approx(others.logprobs, abs=1e-4)


def test_an_attached_server_that_cuts_prefills_is_refused_where_they_are_to_be_the_learners():
    cuts = {"chunked_prefill_size": 4096, "device": "cpu"}
    with pytest.raises(ServerFailed, match=r"http://a:1 runs with chunked_prefill_size=4096.*allowed .*=-1"):
        check_prefills(cuts, "full_prefill", "http://a:1")
    for arguments, score in (
        (cuts, "prefill"),
        ({**cuts, "device": "cuda"}, "full_prefill"),
        ({**cuts, "chunked_prefill_size": -1}, "full_prefill"),
        ({**cuts, "chunked_prefill_size": None}, "full_prefill"),
    ):
        check_prefills(arguments, score, "http://a:1")


def test_an_answer_whose_server_has_another_version_by_then_keeps_the_log_probs_of_decode(fresh_server):
    class Renamed(Client):
        async def before(self) -> None:
            await self.update_weight_version("1.0", TIMEOUT)

    answers, client = answers_of(fresh_server.address, Renamed)
    assert len(client.prefilled) == len(answers) == 4
    assert not any(answer.meta_info.by_prefill for answer in answers)
    assert all(logprobs(answer) != client.prefilled[(*PROMPT, *answer.output_ids)] for answer in answers)


def test_an_answer_whose_prefill_fails_keeps_the_log_probs_of_decode(fresh_server):
    class Lost(Client):
        async def before(self) -> None:
            raise EngineError(self.address, "/generate", None, "lost")

    answers, _ = answers_of(fresh_server.address, Lost)
    assert [len(logprobs(answer)) for answer in answers] == [24] * 4
    assert not any(answer.meta_info.by_prefill for answer in answers)


def test_an_answer_whose_prefill_is_no_number_keeps_the_log_probs_of_decode(fresh_server):
    class Nulls(Client):
        async def _post(self, path: str, body: Any, timeout: float | None = None) -> bytes:
            content = msgspec.json.decode(await super()._post(path, body, timeout))
            if content["meta_info"].get("input_token_logprobs"):
                content["meta_info"]["input_token_logprobs"][-1][0] = None  # SGLang's JSON for what is no number
            return msgspec.json.encode(content)

    answers, client = answers_of(fresh_server.address, Nulls, n=1)
    assert all(math.isnan(logprobs[-1]) for logprobs in client.prefilled.values())
    assert len(client.prefilled) == 1
    assert not any(answer.meta_info.by_prefill for answer in answers)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.0}], ids=["cooler", "greedy"])
def test_what_is_drawn_at_another_temperature_is_not_scored_by_a_prefill(fresh_server, sampling):
    answers, client = answers_of(fresh_server.address, **sampling)
    assert client.prefilled == {}
    assert not any(answer.meta_info.by_prefill for answer in answers)


def test_a_request_that_is_ended_does_not_wait_for_prefills(fresh_server):
    class Stuck(Client):
        async def before(self) -> None:
            asking.set()
            await asyncio.sleep(TIMEOUT)

    async def run() -> list[Answer]:
        client = Stuck(fresh_server.address)
        policy = GroupPolicy(One(client), 0, PolicyVersion(0), 0, by_prefill=True)
        try:
            waiting = asyncio.ensure_future(policy.generate(PROMPT, SAMPLING, 1, "r"))
            await asyncio.wait_for(asking.wait(), TIMEOUT)
            await policy.abort("r")
            return await asyncio.wait_for(waiting, TIMEOUT / 4)
        finally:
            await client.close()

    asking = asyncio.Event()
    (answer,) = asyncio.run(run())
    assert not answer.meta_info.by_prefill
    assert (len(answer.output_ids), answer.meta_info.finish_reason.type) == (24, "length")


@pytest.mark.parametrize("score", ["prefill", "full_prefill"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"sampling": {"temperature": 0.8}}, "temperature=0.8"),
        ({"sampling": {"top_p": 0.9}}, "top_p=0.9"),
        ({"attach": ["http://a:1"], "router": "http://b:2"}, "http://b:2 may choose another"),
        ({"pools": [{"name": "a"}, {"name": "b", "sampling": {"top_k": 5}}]}, "top_k=5"),
    ],
)
def test_what_a_prefill_cannot_score_is_refused(other, said, score):
    with pytest.raises(ValueError, match=f"score: {score}") as refused:
        Config.model_validate({"generate": {"score": score, **other}})
    assert said in str(refused.value)


def test_rows_as_served_are_refused_where_attention_has_pads():
    with pytest.raises(ValueError, match=r"allowed: false, or model\.implementation=megatron"):
        Config.model_validate({"learner": {"as_served": True}, "model": {"implementation": "transformers"}})


def test_experts_of_the_draw_are_refused_beside_prefills():
    with pytest.raises(ValueError, match=r"allowed: decode, or learner\.router_replay=false"):
        Config.model_validate({"generate": {"score": "prefill"}, "learner": {"router_replay": True}})
