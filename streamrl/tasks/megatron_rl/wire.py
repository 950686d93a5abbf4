"""What an environment server and its caller say to each other, in Megatron-RL's shapes: JSON both ways.

    POST http://ENVIRONMENT/grouped_rollouts/      RemoteGroupedRolloutRequest  -> a list of groups, each of rollouts
    POST http://ENVIRONMENT/rollouts/              RemoteRolloutRequest         -> a list of rollouts
    POST http://ENVIRONMENT/contrastive_rollouts/  RemoteRolloutRequest         -> a list of pairs
    POST http://ENVIRONMENT/evaluation/            RemoteEvaluationRequest      -> an EvaluationResponse
    POST http://POLICY/base_generate/              InferenceRequest             -> InferenceResponse

Each request to an environment has the address of the policy in it: `inference_interface.env_server_host_port`.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from pydantic import Field

from streamrl.tasks.megatron_rl.agents import EvaluationRequest, GroupedRolloutRequest, RolloutRequest
from streamrl.tasks.megatron_rl.inference import (
    InferenceRequest,
    InferenceResponse,
    InferenceServer,
    ReturnsRaw,
    ReturnsTokens,
)

LARGEST = 256 << 20  # bytes of one request or reply: the token ids of a batch

ANSWER_TIMEOUT = 600.0  # seconds that one answer of the policy may take


class Seeded(RolloutRequest):
    """A request of streamrl's has a seed, so that the same prompt index has the same prompt."""

    seed: int | None = None


class RemoteRolloutRequest(Seeded):
    """A `RolloutRequest` on the wire."""

    inference_interface: InferenceServer


class RemoteGroupedRolloutRequest(GroupedRolloutRequest):
    """A `GroupedRolloutRequest` on the wire."""

    inference_interface: InferenceServer
    seed: int | None = None


class RemoteEvaluationRequest(EvaluationRequest):
    """An `EvaluationRequest` on the wire."""

    inference_interface: InferenceServer


class CallFailed(ConnectionError):
    """The other end did not answer as it should."""


async def post(url: str, body: Any, *, timeout: float, headers: dict[str, str] | None = None) -> bytes:
    """The reply to JSON: text, or what becomes JSON. Raises CallFailed, and TimeoutError."""
    limit = aiohttp.ClientTimeout(total=timeout)
    given = {"data": body, "headers": {"Content-Type": "application/json", **(headers or {})}}
    try:
        async with aiohttp.ClientSession(timeout=limit) as session, session.post(url, **given) as reply:
            content = await reply.read()
            if reply.status != 200:
                raise CallFailed(f"{url}: status {reply.status}: {content[:200].decode(errors='replace')}")
            return content
    except aiohttp.ClientError as error:
        raise CallFailed(f"{url}: {type(error).__name__}: {error}") from None


@InferenceServer.register_subclass
class InferenceInterfaceClient(InferenceServer):
    """A policy at an address."""

    type_name: str = Field("InferenceInterfaceClient", frozen=True)
    env_server_host_port: str
    conversation_template: None = None

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        url = f"http://{self.env_server_host_port}/base_generate/"
        return InferenceResponse.model_validate_json(await post(url, request.model_dump_json(), timeout=ANSWER_TIMEOUT))


@InferenceServer.register_subclass
class InferenceInterfaceServer(InferenceInterfaceClient, ReturnsRaw, ReturnsTokens):
    """A policy at an address whose answers have token ids."""

    type_name: str = Field("InferenceInterfaceServer", frozen=True)
