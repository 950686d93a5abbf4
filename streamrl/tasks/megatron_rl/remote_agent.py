"""The agent behind an environment server: it plays there, and asks the run's policy over HTTP.

worker ── request with the policy's address ──▶ environment server
       ◀── base_generate, as often as it likes ──
       ◀── rollouts ──
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, TypeAdapter

from streamrl.tasks.megatron_rl.agents import (
    ContrastiveRolloutGenerator,
    EvaluationAgent,
    EvaluationRequest,
    GroupedRolloutGenerator,
    GroupedRolloutRequest,
    GroupRolloutParams,
    RolloutGenerator,
    RolloutRequest,
)
from streamrl.tasks.megatron_rl.inference import InferenceInterface, InferenceServer
from streamrl.tasks.megatron_rl.interface_server import InterfaceServer
from streamrl.tasks.megatron_rl.rollouts import ContrastiveRollout, EvaluationResponse, TokenRollout
from streamrl.tasks.megatron_rl.wire import CallFailed, InferenceInterfaceServer, post
from streamrl.tasks.reachable import LOOK_TIMEOUT, bearer

_GROUPS = TypeAdapter(list[list[TokenRollout]])
_ROLLOUTS = TypeAdapter(list[TokenRollout])
_PAIRS = TypeAdapter(list[ContrastiveRollout])


class RemoteAgent(RolloutGenerator, GroupedRolloutGenerator, ContrastiveRolloutGenerator, EvaluationAgent):
    """Prompts, rollouts and rewards of an environment server of Megatron-RL's kind."""

    env_id: str = "remote"
    env_server_host_port: str
    interface_host: str = "127.0.0.1"  # address of the worker that the server reaches
    timeout: float = 600.0  # seconds that a group may take
    token_file: Path | None = None  # file with the bearer token that the server asks for
    _interfaces: InterfaceServer | None = PrivateAttr(None)

    def __init__(self, **given: Any) -> None:
        """Raises ValueError for a server that is not there."""
        super().__init__(**given)
        host, _, port = self.env_server_host_port.partition("/")[0].rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=LOOK_TIMEOUT).close()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"env_server_host_port: {self.env_server_host_port}: {error}; allowed: HOST:PORT of a server that runs"
            ) from None

    async def prepare_group_rollout(self, request: GroupedRolloutRequest) -> GroupRolloutParams:
        raise NotImplementedError("the server begins its groups itself: get_grouped_rollouts")

    async def get_grouped_rollouts(self, request: GroupedRolloutRequest) -> AsyncGenerator[list[TokenRollout], None]:
        for group in _GROUPS.validate_json(await self._call("grouped_rollouts", request)):
            yield group

    async def get_reward_rollouts(self, request: RolloutRequest) -> list[Any]:
        return _ROLLOUTS.validate_json(await self._call("rollouts", request))

    async def get_contrastive_rollouts(self, request: RolloutRequest) -> list[ContrastiveRollout]:
        return _PAIRS.validate_json(await self._call("contrastive_rollouts", request))

    async def run_evaluation(self, request: EvaluationRequest) -> EvaluationResponse[Any]:
        response: Any = EvaluationResponse.model_validate_json(await self._call("evaluation", request))
        return response.unwrap() if response.type_name != "Null" else response

    async def close(self) -> None:
        """Let go of the address at which the policy is asked."""
        if self._interfaces is not None:
            await self._interfaces.close()
            self._interfaces = None

    async def _call(self, name: str, request: Any) -> bytes:
        """Raises CallFailed for a server that does not answer as it should."""
        body = request.model_dump(mode="json", exclude={"inference_interface"})
        body["seed"] = random.getrandbits(31)
        async with self._address(request.inference_interface) as interface:
            body["inference_interface"] = interface.model_dump(mode="json")
            url = f"http://{self.env_server_host_port}/{name}/"
            try:
                return await post(url, json.dumps(body), timeout=self.timeout, headers=bearer(self.token_file))
            except TimeoutError:
                raise CallFailed(f"{url}: no reply in {self.timeout:g} s") from None

    @contextlib.asynccontextmanager
    async def _address(self, interface: InferenceInterface) -> AsyncIterator[InferenceServer]:
        """The interface as it travels."""
        if isinstance(interface, InferenceServer):
            yield interface
            return
        if self._interfaces is None:
            self._interfaces = InterfaceServer(self.interface_host)
        await self._interfaces.start()
        async with self._interfaces.serving(interface) as address:
            yield InferenceInterfaceServer(env_server_host_port=address)
