"""An OpenAI-compatible endpoint as `Policy` (generate/inference.py): /completions with token ids and log-probs.

    token ids ─▶ POST /completions {logprobs, return_token_ids} ─▶ choices with token ids and log-probs
                   └ 429, 5xx, no answer: again, within the deadline

Asked of SGLang and vLLM by the same names. vLLM before `return_token_ids` tells ids as the log-probs' tokens,
`token_id:N`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineError, SentImage
from streamrl.generate.frozen import Ends, EngineRefused, Parameters, check_request, typed_answer
from streamrl.generate.tokenizer import Tokenizer
from streamrl.types import PolicyVersion

COMPLETIONS, MODELS = "/completions", "/models"

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a request is sent again, unless Retry-After says how many

CHECK_TOKENS = 8  # of the answer that is asked for at the start

_ID = "token_id:"  # vLLM's form of a token with `return_tokens_as_token_ids`


class Endpoint(NamedTuple):
    """Where, and as whom."""

    url: str
    model: str | None  # None: the only one there
    key_variable: str
    key: str | None
    retries: int


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str | None] = []
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    id: str = ""


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_COMPLETION = msgspec.json.Decoder(_Completion)
_MODELS = msgspec.json.Decoder(_Models)


class OpenAiPolicy:
    """A connection pool to one endpoint. `check` it before its first request, `close` it."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        """`timeout`: seconds of one request, with all its repetitions."""
        self._endpoint = endpoint
        self._url = endpoint.url.rstrip("/")
        self._who = self._url  # with what it says of itself, once it is known
        self._timeout = timeout
        self._model = endpoint.model
        self._running: dict[str, asyncio.Task[Any]] = {}
        headers = {"Content-Type": "application/json"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def check(self, tokenizer: Tokenizer) -> None:
        """Ask for the model and for a few tokens. Raises EngineRefused where the endpoint lacks what is needed.

        `tokenizer`: what must be the model's own.
        """
        await self._find_model()
        ids = tokenizer.plain_ids("a b").tolist() or [tokenizer.largest_id]
        asked = Parameters(temperature=0.0, max_new_tokens=CHECK_TOKENS, stop_token_ids=tokenizer.end_ids)
        try:
            (choice,) = (await self._ask(ids, asked, 1)).choices
        except EngineError as error:
            raise error if error.status is None else self._refused(error) from None
        answer = self._answer(choice, asked, ids)
        (text,) = tokenizer.text([answer.output_ids])
        told, made = "".join(choice.text.split()), "".join(text.split())
        if told != made and "\ufffd" not in told + made:
            raise EngineRefused(
                self._who,
                f"its answer {choice.text!r:.60} is {text!r:.60} by the tokenizer of model.path; allowed: a folder "
                f"with the tokenizer of {self._model}",
            )

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        *,
        routed_experts: bool = False,
        kept_sets: bool = False,
        ends: Ends | None = None,
        priority: int = 0,
        images: Sequence[SentImage] = (),
        at_least: PolicyVersion | None = None,
    ) -> list[Answer]:
        """`n` answers. `sampling`: SGLang's names. The log-probs are what the endpoint means by them.

        The endpoint orders the requests that wait. Raises EngineRefused for what it cannot do or does not tell,
        EngineError with a status for a request that it does not answer, and without one where it is not reached.
        """
        check_request(self._who, experts=routed_experts, sets=kept_sets, images=images, at_least=at_least)
        asked = Parameters.of(sampling, self._who)
        name = request_id or uuid.uuid4().hex
        asking = self._running[name] = asyncio.ensure_future(self._ask(input_ids, asked, n))
        try:
            found = await asyncio.shield(asking)
        except asyncio.CancelledError:
            if not asking.cancelled():
                raise  # from outside
            raise EngineError(self._url, COMPLETIONS, None, "ended at the deadline", late=True) from None
        finally:
            asking.cancel()
            self._running.pop(name, None)
        choices = sorted(found.choices, key=lambda choice: choice.index)
        if len(choices) != n:
            raise EngineRefused(self._who, f"{len(choices)} answers where n={n}; allowed: as many as are asked for")
        return [self._answer(choice, asked, input_ids) for choice in choices]

    async def abort(self, request_id: str = "") -> None:
        """End one request, or all: nothing comes of it, for an endpoint tells nothing of an answer that is cut."""
        for name, asking in list(self._running.items()):
            if request_id in ("", name):
                asking.cancel()

    async def close(self) -> None:
        await self.abort()
        await self._session.close()

    async def _find_model(self) -> None:
        """Which model is meant, and what the endpoint says that it is. One without a list has any name."""
        try:
            found = self._decode(_MODELS, MODELS, await self._repeated("GET", MODELS, None)).data
        except EngineError as error:
            if error.status is None:
                raise
            if error.status in (401, 403) or self._model is None:
                raise self._refused(error) from None
            return
        names = [model.id for model in found]
        if self._model is None and len(names) != 1:
            raise EngineRefused(self._url, f"it has {len(names)} models; allowed: model, one of {', '.join(names)}")
        if self._model is not None and self._model not in names:
            raise EngineRefused(self._url, f"model: {self._model} is not there; allowed: {', '.join(names)}")
        self._model = self._model or names[0]
        owner = next((model.owned_by for model in found if model.id == self._model), None)
        self._who = f"{self._url} ({owner})" if owner else self._url

    async def _ask(self, ids: Sequence[int], asked: Parameters, n: int) -> _Completion:
        # All that shapes the distribution is said: what is left out, a server takes from the model's own defaults.
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            "n": n,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(asked.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        body |= {"stop": list(asked.stop)} if asked.stop else {}
        body |= {"seed": asked.seed} if asked.seed is not None else {}
        content = await self._repeated("POST", COMPLETIONS, msgspec.json.encode(body))
        found: _Completion = self._decode(_COMPLETION, COMPLETIONS, content)
        return found

    async def _repeated(self, method: str, path: str, body: bytes | None) -> bytes:
        """The answer's content, asked for again where that may help and there is time. Raises EngineError."""
        end = time.monotonic() + self._timeout
        for attempt in range(self._endpoint.retries + 1):
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.75, 1.0)
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    async with self._session.request(method, self._url + path, data=body) as response:
                        content = await response.read()
                if response.status == 200:
                    return content
                error = EngineError(self._url, path, response.status, _reason(content))
                again = response.status == 429 or response.status >= 500
                pause = max(pause, _seconds(response.headers.get("Retry-After")))
            except TimeoutError:
                raise EngineError(self._url, path, None, f"none in {self._timeout:g} s", late=True) from None
            except aiohttp.ClientError as raised:
                error = EngineError(self._url, path, None, f"{type(raised).__name__}: {raised}")
                again = True
            if not again or attempt == self._endpoint.retries or time.monotonic() + pause >= end:
                break
            await asyncio.sleep(pause)
        raise error

    def _answer(self, choice: _Choice, asked: Parameters, prompt: Sequence[int]) -> Answer:
        """A choice as a server's answer. Raises EngineRefused where it does not tell enough."""
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(prompt):
            raise EngineRefused(self._who, "it answered other token ids than it was given; allowed: the same ones")
        told = choice.logprobs
        if told is None or told.token_logprobs is None:
            raise EngineRefused(self._who, "its answers have no log-probs, and logprobs=0 asks for them; " + _ABLE)
        ids = choice.token_ids
        if ids is None:
            ids = [int(each.removeprefix(_ID)) for each in told.tokens if each is not None and _is_id(each)]
            if len(ids) != len(told.tokens) or (choice.text and not ids):
                raise EngineRefused(
                    self._who, "its answers have no token ids, and return_token_ids asks for them; " + _ABLE
                )
        if set(ids[:-1]) & set(asked.stop_token_ids):
            raise EngineRefused(
                self._who, "an answer goes on behind an end token, and stop_token_ids names it; " + _ABLE
            )
        if None in told.token_logprobs:
            raise EngineRefused(self._who, "the log-prob of a token is null; " + _ABLE)
        logprobs = [each for each in told.token_logprobs if each is not None]
        finish: Literal["stop", "length", "abort"] = "abort"
        if choice.finish_reason in ("stop", "length"):
            finish = "stop" if choice.finish_reason == "stop" else "length"
        return typed_answer(self._who, f"{uuid.uuid4().hex}-{choice.index}", ids, logprobs, finish)

    def _refused(self, error: EngineError) -> EngineRefused:
        """What the endpoint says at the start, in one line."""
        if error.status in (401, 403):
            key = f"{self._endpoint.key_variable} is {'not the one' if self._endpoint.key else 'not set'}"
            return EngineRefused(self._url, f"it asks for an API key, and {key} (status {error.status})")
        return EngineRefused(self._who, f"{error.path}: status {error.status}: {error.reason}")

    def _decode(self, decoder: msgspec.json.Decoder[Any], path: str, content: bytes) -> Any:
        try:
            return decoder.decode(content)
        except msgspec.DecodeError as error:
            raise EngineRefused(self._who, f"{path}: {error}: {_reason(content)}") from None


_ABLE = "allowed: an endpoint of SGLang, or of vLLM, that does"


def _is_id(token: str) -> bool:
    return token.startswith(_ID) and token.removeprefix(_ID).isdecimal()


def _seconds(header: str | None) -> float:
    """Retry-After, where it is a number of seconds."""
    return float(header) if header is not None and header.isdecimal() else 0.0


def _reason(content: bytes) -> str:
    """What an error's body says: OpenAI's and vLLM's `error.message`, SGLang's `message`; else its first line."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict):
        inner = body.get("error", body)
        found = inner.get("message", inner) if isinstance(inner, dict) else inner
        return " ".join(str(found).split())[:300]
    return content.decode(errors="replace").strip().partition("\n")[0][:300]
