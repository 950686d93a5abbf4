"""The client of OpenAI-compatible endpoints against one on this machine: what it asks, takes and refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import tiny_model
from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.generate import openai_policy
from streamrl.generate.engines import make_engine
from streamrl.generate.frozen import EngineRefused
from streamrl.generate.inference import Policy
from tests.generate import openai_endpoint
from tests.generate.openai_endpoint import RECORDED, Endpoint, older_vllm, vllm

PROMPT = [2, 3, 1]
IDS = RECORDED["completion"]["choices"][0]["token_ids"]
LOGPROBS = RECORDED["completion"]["choices"][0]["logprobs"]["token_logprobs"]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 6, "stop_token_ids": [0]}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(openai_policy, "FIRST_PAUSE", 0.01)
    with openai_endpoint.serving() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.make_tokenizer(8).save_pretrained(folder)
    return folder


Question = Callable[[Policy], Awaitable[Any]]
Ask = Callable[..., Any]


@pytest.fixture
def ask(endpoint: Endpoint, tokenizer_folder: Path) -> Ask:
    def run(question: Question, timeout: float = 60.0, **options: Any) -> Any:
        config = Config.model_validate({"model": {"path": tokenizer_folder}, "generate": {"request_timeout": timeout}})
        engine = make_engine("openai", {"url": endpoint.url} | options)

        async def within() -> Any:
            async with engine.serving(config, tokenizer_folder) as policy:
                return await question(policy)

        return asyncio.run(within())

    return run


def plain(policy: Policy) -> Awaitable[Any]:
    return policy.generate(PROMPT, SAMPLING, 2)


@pytest.mark.parametrize("change", [lambda answer: None, vllm, older_vllm], ids=["sglang", "vllm", "older vllm"])
def test_each_form_of_an_answer_is_typed(ask, endpoint, change):
    endpoint.change = change
    for answer in ask(plain):
        assert answer.output_ids == IDS
        assert [entry[:2] for entry in answer.meta_info.output_token_logprobs] == list(zip(LOGPROBS, IDS, strict=True))
        assert [(span.version, span.start, span.end) for span in answer.meta_info.weight_versions] == [("0.0", 0, 6)]
        assert answer.meta_info.finish_reason.type == "stop"


def test_a_request_says_all_that_shapes_the_distribution_and_brings_the_key(ask, endpoint, monkeypatch):
    endpoint.key = "secret"
    monkeypatch.setenv("JUDGE_KEY", "secret")
    more = {"min_p": 0.1, "sampling_seed": 7, "stop": ["x"]}
    ask(lambda policy: policy.generate(PROMPT, SAMPLING | more, 2), key_variable="JUDGE_KEY")
    expected = {"model": "tiny", "prompt": PROMPT, "n": 2, "max_tokens": 6, "temperature": 0.7, "top_p": 0.9,
                "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["x"], "stop_token_ids": [0], "logprobs": 0,
                "return_token_ids": True, "repetition_penalty": 1.0}  # fmt: skip
    assert expected.items() <= endpoint.asked[-1].items()
    ask(plain, key_variable="JUDGE_KEY", model="tiny")
    assert endpoint.asked[-1]["min_p"] == 0.0  # what is off is said, too: else a model's own default holds
    assert "seed" not in endpoint.asked[-1]


def first(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    def of(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            change(choice)

    return of


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (first(lambda choice: choice.update(logprobs=None)), "(sglang): its answers have no log-probs, and logprobs=0"),
        (first(lambda choice: choice.pop("token_ids")), "(sglang): its answers have no token ids, and return_token"),
        (first(lambda choice: choice["logprobs"]["token_logprobs"].pop()), "5 log-probs for 6 token ids"),
        (first(lambda choice: choice["logprobs"].update(token_logprobs=[None] * 6)), "log-prob of a token is null"),
        (first(lambda choice: choice.update(prompt_token_ids=[9, 9])), "other token ids than it was given"),
        (first(lambda choice: choice.update(token_ids=[4, 0, 1, 9, 3, 0])), "goes on behind an end token"),
        (first(lambda choice: choice.update(text="other")), "by the tokenizer of model.path; allowed: a folder with"),
        (lambda answer: answer.pop("choices"), "/completions: Object missing required field `choices`"),
    ],
)  # fmt: skip
def test_an_endpoint_that_does_not_tell_enough_is_refused_at_the_start(ask, endpoint, change, line):
    endpoint.change = change
    with pytest.raises(EngineRefused) as refused:
        ask(plain)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(endpoint.asked) == 1


def test_answers_that_are_missing_later_are_refused_too(ask, endpoint):
    async def question(policy: Policy) -> None:
        endpoint.change = lambda answer: answer["choices"].pop()
        await plain(policy)

    with pytest.raises(EngineRefused, match="1 answers where n=2"):
        ask(question)


def test_who_is_asked_is_clear_or_refused(ask, endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(EngineRefused, match="model: huge is not there; allowed: tiny"):
        ask(plain, model="huge")
    endpoint.key = "secret"
    with pytest.raises(EngineRefused, match="asks for an API key, and OPENAI_API_KEY is not set"):
        ask(plain)
    endpoint.key, endpoint.models = None, [{"id": "a"}, {"id": "b"}]
    with pytest.raises(EngineRefused, match="2 models; allowed: model, one of a, b"):
        ask(plain)
    for url in ("ftp://a", "http://user:key@a/v1"):
        with pytest.raises(ValueError, match=r"evaluate.engine_options.url: .* is not allowed"):
            make_engine("openai", {"url": url})


def test_a_failing_request_is_sent_again_within_its_retries_and_its_deadline(ask, endpoint):
    async def question(policy: Policy) -> None:
        endpoint.failures = [503, 429, 0]
        assert len(await plain(policy)) == 2
        endpoint.failures = [503] * 9
        with pytest.raises(EngineError, match="status 503") as failed:
            await plain(policy)
        assert failed.value.status == 503  # costs these answers, not the evaluation
        assert len(endpoint.failures) == 9 - 4
        endpoint.failures = [400]
        with pytest.raises(EngineError, match="status 400: temperature must be"):
            await plain(policy)
        assert endpoint.failures == []

    ask(question, retries=3)

    async def stuck(policy: Policy) -> None:
        endpoint.stuck = True
        with pytest.raises(EngineError, match="none in 1 s") as late:
            await plain(policy)
        assert late.value.late

    ask(stuck, timeout=1.0)


def test_an_aborted_request_comes_back_at_once_and_a_lost_endpoint_has_no_status(ask, endpoint):
    async def question(policy: Policy) -> None:
        endpoint.stuck = True
        asking = asyncio.ensure_future(policy.generate(PROMPT, SAMPLING, 1, "mine"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await policy.abort("mine")
        with pytest.raises(EngineError, match="ended at the deadline") as ended:
            await asking
        assert ended.value.late
        assert time.monotonic() - began < 30
        assert not isinstance(ended.value, EngineRefused)

    ask(question)
    endpoint.url = "http://127.0.0.1:1/v1"
    with pytest.raises(EngineError, match="no answer: ClientConnectorError") as lost:
        ask(plain, retries=1)
    assert lost.value.status is None
