"""SGLang's HTTP interface, as far as streamrl uses it: typed answers, one exception, a deadline on every call."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import aiohttp
import msgspec

from streamrl.engine.answers import (
    Answer,
    AnswerMeta,
    ModelInfo,
    Piece,
    PieceMeta,
    Prefill,
    PrefillScores,
    Pressure,
)
from streamrl.engine.event_stream import EventSplitter
from streamrl.engine.keys import NO_KEYS, EngineKeys
from streamrl.types import PolicyVersion

Interruption = Literal["retract", "in_place"]


class EngineError(RuntimeError):
    """A call that a server did not answer with success.

    `status` is the HTTP status, or None where there was no answer at all (refused, cut off); `late` where
    there was none in time.
    """

    def __init__(self, address: str, path: str, status: int | None, reason: str, *, late: bool = False) -> None:
        super().__init__(f"{address}{path}: {'no answer' if status is None else f'status {status}'}: {reason}")
        self.address = address
        self.path = path
        self.status = status
        self.reason = reason
        self.late = late


# The paths used here that SGLang opens to its API key; all others command the server: its admin key.
KV_CACHE = "kv_cache"  # SGLang's tag of the memory that holds it

API_PATHS = ("/generate", "/model_info", "/server_info", "/v1/loads")


# Which of a server's models takes a version: a draft beside the policy (`generate.speculation`) keeps its own weights.
# SGLang's default is both, so that a draft would load what its names have in common with the policy's.
POLICY_ALONE = "target"

# Seconds that an idle connection is kept: SGLang closes one after five, and a request that meets the closing is lost.
KEEPALIVE = 1.0


class _Loads(msgspec.Struct, frozen=True):
    loads: list[Pressure]  # one for each data-parallel rank


class _StreamError(msgspec.Struct, frozen=True):
    """What a server says in the place of a piece."""

    message: str = "unknown"
    code: int | str = 500


class _Event(msgspec.Struct, frozen=True):
    error: _StreamError | None = None


_ANSWERS = msgspec.json.Decoder(list[Answer] | Answer)
_PREFILL = msgspec.json.Decoder(Prefill)
_PIECE = msgspec.json.Decoder(Piece)
_EVENT = msgspec.json.Decoder(_Event)
_LOADS = msgspec.json.Decoder(_Loads)
_MODEL_INFO = msgspec.json.Decoder(ModelInfo)
_ANY = msgspec.json.Decoder()
_JSON = msgspec.json.Encoder()

STREAM_END = b"[DONE]"
ERROR_START = b'{"error"'


class SentImage(NamedTuple):
    """An image of a prompt."""

    reference: str  # a path, a URL or a data URL
    tokens: int | None = None  # that the server is to make of the one in its place; None: not known here


class RequestOptions(TypedDict, total=False):
    """What a request may ask for beyond its tokens."""

    adapter: str | None  # the name of a loaded one; None: the base weights alone
    routed_experts: bool  # with the experts of each token, from a server that was started to keep them
    kept_sets: bool  # with the ids from which each token was drawn, for one answer alone
    ends: object  # for a caller that sends a request in parts (generate/requests.py); a server is not asked about it
    cache: str | None  # under which name the server keeps what it computes: only requests of the same name reuse it
    priority: int  # where several wait, lower ones are drawn first, by a server that was started to (engine/server.py)
    images: Sequence[SentImage]  # in the order of their places in the prompt
    pieces: Callable[[Piece], None]  # is given the answers as they are drawn, and then none are returned
    every: int  # tokens of a piece
    at_least: PolicyVersion | None  # for a caller that has several servers to choose from; one server has what it has


class EngineClient:
    """A connection pool to one server. `close` it.

    Usage:
        client = EngineClient("http://127.0.0.1:30000", timeout=600)
        answers = await client.generate([5, 6, 7], {"temperature": 1.0, "max_new_tokens": 4}, n=8)
    """

    def __init__(self, address: str, timeout: float, keys: EngineKeys = NO_KEYS) -> None:
        """`address`: `http://HOST:PORT`, HOST a name, IPv4 or a bracketed IPv6 address. `timeout`: seconds a call."""
        self.address = address.rstrip("/")
        self._timeout = timeout
        self._api, self._admin = _bearer(keys.api), _bearer(keys.admin or keys.api)
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),  # every call brings its own
            # How much is in flight is decided by tickets.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
        )

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Answer]:
        """`n` answers to one prompt. `sampling` is SGLang's sampling_params without `n`.

        Raises EngineError, without a status where the server was lost; with `pieces` also in the middle. With a status
        where the server makes another number of tokens of the images.
        """
        prompt_tokens = _prompt_tokens(input_ids, options.get("images", ()))
        ends = sampling.get("stop_token_ids") != []  # SGLang would still end at those of config.json
        body = _request(input_ids, {"ignore_eos": not ends, **sampling, "n": n}, request_id, options)
        if on_piece := options.get("pieces"):
            body["stream"] = True
            body["sampling_params"]["stream_interval"] = options.get("every")
            await self._stream(body, on_piece, prompt_tokens)
            return []
        answers = self._decode(_ANSWERS, "/generate", await self._post("/generate", body))
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            self._check_prompt(answer.meta_info, prompt_tokens)
        return list(answers)

    async def score(
        self,
        input_ids: Sequence[int],
        start: int,
        request_id: str | None = None,
        *,
        cached: bool = True,
        **options: Unpack[RequestOptions],
    ) -> PrefillScores:
        """The log-probs of the tokens from place `start` on, 1 at least, by one prefill. Raises EngineError.

        What the server calls no number, null in its answer, is NaN.
        What the server has cached of the tokens before them is used if `cached`; else all is computed again.
        """
        body = _request(input_ids, {"temperature": 1.0, "max_new_tokens": 0}, request_id, options)
        first = start if cached else 1  # SGLang uses no cache of tokens whose log-probs it is asked for
        body["logprob_start_len"] = first - 1
        meta = self._decode(_PREFILL, "/generate", await self._post("/generate", body)).meta_info
        told = [entry[0] for entry in meta.input_token_logprobs[1:]][start - first :]
        if len(told) != len(input_ids) - start:
            reason = f"{len(told)} log-probs of {len(input_ids) - start} tokens that it was given"
            raise EngineError(self.address, "/generate", 200, reason)
        return PrefillScores([math.nan if each is None else each for each in told], meta.weight_version)

    async def abort(self, request_id: str = "", timeout: float | None = None) -> None:
        """End one request where it is, or all without an id; their answers come back with what they have."""
        await self._post("/abort_request", {"rid": request_id, "abort_all": not request_id}, timeout)

    async def pressure(self, timeout: float = 5.0) -> Pressure:
        """How full the server is: its fullest data-parallel rank."""
        found = self._decode(_LOADS, "/v1/loads", await self._call("GET", "/v1/loads", None, timeout)).loads
        if not found:
            raise EngineError(self.address, "/v1/loads", 200, "no load of any rank")
        return max(found, key=lambda load: (load.token_usage, load.num_waiting_reqs))

    async def model_info(self, timeout: float = 5.0) -> ModelInfo:
        body = await self._call("GET", "/model_info", None, timeout)
        return self._decode(_MODEL_INFO, "/model_info", body)

    async def server_info(self, timeout: float) -> dict[str, Any]:
        """The arguments that the server runs with, by SGLang's names."""
        body = await self._call("GET", "/server_info", None, timeout)
        found: dict[str, Any] = self._decode(_ANY, "/server_info", body)
        return found

    async def pause(self, mode: Interruption, timeout: float) -> None:
        """Stop generating; requests stay. `retract` gives up their KV cache, `in_place` keeps it."""
        await self._post("/pause_generation", {"mode": mode}, timeout)

    async def resume(self, timeout: float) -> None:
        await self._post("/continue_generation", {}, timeout)

    async def release_memory(self, timeout: float) -> None:
        """Give the KV cache's memory back to the device; only while the server is paused by `retract`."""
        await self._post("/release_memory_occupation", {"tags": [KV_CACHE]}, timeout)

    async def take_memory(self, timeout: float) -> None:
        """Take it again: what was cached is gone."""
        await self._post("/resume_memory_occupation", {"tags": [KV_CACHE]}, timeout)

    async def begin_weight_update(self, timeout: float) -> None:
        await self._post("/begin_weight_update", {"selector": POLICY_ALONE}, timeout)

    async def end_weight_update(self, timeout: float) -> None:
        await self._post("/end_weight_update", {}, timeout)

    async def init_weights_group(
        self, *, host: str, port: int, world_size: int, group: str, backend: str, timeout: float
    ) -> None:
        """Join the torch.distributed group whose rank 0 listens at `host`; returns when all ranks are there."""
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        await self._post("/init_weights_update_group", {**body, "group_name": group, "backend": backend}, timeout)

    async def destroy_weights_group(self, group: str, timeout: float) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group}, timeout)

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: str,
        flush_cache: bool,
        timeout: float,
    ) -> None:
        """Receive one flattened bucket by a broadcast of `group` and load it. `dtypes` are torch's names."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": version,
            "flush_cache": flush_cache,
            "load_format": "flattened_bucket",
            "selector": POLICY_ALONE,
        }
        await self._post("/update_weights_from_distributed", body, timeout)

    async def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, version: str, flush_cache: bool, timeout: float
    ) -> None:
        """Have the server's own loader take a payload in each rank. `payloads`: pickles in base64, one a rank."""
        body = {
            "serialized_named_tensors": payloads,
            "load_format": load_format,
            "weight_version": version,
            "flush_cache": flush_cache,
            "selector": POLICY_ALONE,
        }
        await self._post("/update_weights_from_tensor", body, timeout)

    async def update_from_disk(
        self,
        model: str,
        version: str,
        *,
        load_format: str | None = None,
        keep_requests: bool = False,
        flush_cache: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Load a model folder, by its path on the server's machine; requests in flight are ended unless kept.

        A draft beside the policy loads it, too: SGLang takes no selector here.

        `load_format`: SGLang's; None: as the server was started.
        """
        body = {
            "model_path": model,
            "weight_version": version,
            "load_format": load_format,
            "abort_all_requests": not keep_requests,
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_disk", body, timeout)

    async def update_weight_version(self, version: str, timeout: float) -> None:
        """Rename the weights that the server holds; requests in flight are not touched."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout)

    async def load_adapter(self, name: str, folder: str, timeout: float) -> None:
        """Take in the PEFT folder of that path on the server's machine; requests then choose it by `name`."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout)

    async def unload_adapter(self, name: str, timeout: float) -> None:
        """Forget an adapter, once no request uses it any more."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, timeout)

    async def weights_checksum(self) -> dict[str, Any]:
        """SGLang's checksums of the weights that the server holds, in its own names and fusions."""
        return self._decode(_ANY, "/weights_checker", await self._post("/weights_checker", {"action": "checksum"}))

    async def _post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> bytes:
        return await self._call("POST", path, _JSON.encode(body), timeout or self._timeout)

    async def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
        async with self._answering(method, path, body, timeout) as response:
            content = await response.read()
        if response.status != 200:
            raise EngineError(self.address, path, response.status, _first_line(content))
        return content

    async def _stream(self, body: dict[str, Any], on_piece: Callable[[Piece], None], prompt_tokens: int | None) -> None:
        """Give every piece of the answers to `on_piece`, until the server says that there are no more."""
        async with self._answering("POST", "/generate", _JSON.encode(body), self._timeout) as response:
            if response.status != 200:
                raise EngineError(self.address, "/generate", response.status, _first_line(await response.read()))
            async for event in _events(response.content):
                if event == STREAM_END:
                    return
                if event.startswith(ERROR_START):
                    error = self._decode(_EVENT, "/generate", event).error or _StreamError()
                    raise EngineError(self.address, "/generate", _status(error.code), error.message[:500])
                piece = self._decode(_PIECE, "/generate", event)
                self._check_prompt(piece.meta_info, prompt_tokens)
                on_piece(piece)
        raise EngineError(self.address, "/generate", None, "the answer broke off")

    def _check_prompt(self, meta: AnswerMeta | PieceMeta, expected: int | None) -> None:
        if expected is not None and meta.prompt_tokens not in (None, expected):  # None: ended before it was read
            raise EngineError(
                self.address,
                "/generate",
                200,
                f"with its images the prompt has {meta.prompt_tokens} tokens there, and {expected} by the image "
                "processor of the model's folder",
            )

    @contextlib.asynccontextmanager
    async def _answering(
        self, method: str, path: str, body: bytes | None, timeout: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, whose content is read in the block; what breaks there is an EngineError without a status."""
        headers = self._api if path in API_PATHS else self._admin
        if self._session.closed:
            raise EngineError(self.address, path, None, "the connection was closed here")
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(method, self.address + path, data=body, headers=headers) as response,
            ):
                yield response
        except TimeoutError as error:
            raise EngineError(self.address, path, None, f"none in {timeout:g} s", late=True) from error
        except aiohttp.ClientError as error:
            raise EngineError(self.address, path, None, f"{type(error).__name__}: {error}") from error

    def _decode(self, decoder: msgspec.json.Decoder[Any], path: str, content: bytes) -> Any:
        try:
            return decoder.decode(content)
        except msgspec.DecodeError as error:
            raise EngineError(self.address, path, 200, f"{error}: {_first_line(content)}") from error


def _request(
    input_ids: Sequence[int], sampling: dict[str, Any], request_id: str | None, options: RequestOptions
) -> dict[str, Any]:
    """The body of a request for tokens with their log-probs."""
    body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
    if request_id is not None:
        body["rid"] = request_id
    if adapter := options.get("adapter"):
        body["lora_path"] = adapter
    if options.get("routed_experts"):
        body["return_routed_experts"] = True
    if options.get("kept_sets"):
        body["return_sampling_mask"] = True
    if cache := options.get("cache"):
        body["extra_key"] = cache  # not `cache_salt`, which sglang-router does not pass on
    if (priority := options.get("priority")) is not None:
        body["priority"] = priority
    if images := options.get("images"):
        body["image_data"] = [image.reference for image in images]
    return body


def _prompt_tokens(input_ids: Sequence[int], images: Sequence[SentImage]) -> int | None:
    """The tokens of a prompt with images; None where there are none, or their tokens are not known."""
    counts = [image.tokens for image in images if image.tokens is not None]
    return len(input_ids) - len(counts) + sum(counts) if images and len(counts) == len(images) else None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    splitter = EventSplitter()
    async for chunk in content.iter_any():
        for event in splitter.split(chunk):
            yield event


def _status(code: int | str) -> int:
    """What a stream gives as a status is a number, or a word."""
    return code if isinstance(code, int) else 500


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _first_line(content: bytes) -> str:
    return content.decode(errors="replace").strip().partition("\n")[0][:500]
