"""Environments of `verifiers`: its data set, its rollouts and its rubric, against a policy behind a base URL.

The library's own client asks the policy; each episode has a client of its own, because the session is in the address.
Each function of the rubric is a reward part under its name.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from streamrl.tasks.foreign.player import Played, Player, Refused, described, load_named
from streamrl.tasks.order import is_held_out, item_at

# Of the library's classes those that play outside of this process: in rented sandboxes, containers or browsers.
ELSEWHERE = ("SandboxEnv", "PythonEnv", "CliAgentEnv", "HarborEnv", "BrowserEnv", "OpenEnvEnv")

# The library refuses an answer without text. It says something of the policy, so the rubric's reward is kept.
EMPTY = "EmptyModelResponseError"

# Those of its errors that say nothing of the policy. An answer that the policy does not give, the worker knows of.
INFRASTRUCTURE = ("InfraError", "TunnelError", "SandboxError")


def load(options: argparse.Namespace) -> Player:
    """Load the environment and its data set. Raises Refused for what does not play here."""
    try:
        import verifiers
    except ImportError as error:
        raise Refused(f"python: {described(error)}; allowed: an interpreter with the package verifiers") from None
    if not hasattr(verifiers, "Environment"):
        raise Refused(
            f"python: its verifiers {getattr(verifiers, '__version__', '')} has tasksets of verifiers.v1 alone; "
            "allowed: verifiers below 0.4"
        )
    name: str = options.environment
    make = load_named(name) if ":" in name else partial(verifiers.load_environment, name)
    environment = make(**options.options)
    _check(name, environment, verifiers)
    return VerifiersPlayer(environment, verifiers, options)


def _check(name: str, environment: Any, verifiers: Any) -> None:
    if not isinstance(environment, verifiers.Environment):
        raise Refused(
            f"environment: {name} gives a {type(environment).__name__}; allowed: a verifiers.Environment "
            "(SingleTurnEnv, MultiTurnEnv, ToolEnv), not a taskset of verifiers.v1"
        )
    above = {each.__name__ for each in type(environment).__mro__}
    if refused := [each for each in ELSEWHERE if each in above]:
        raise Refused(f"environment: {name} is a {refused[0]}, which needs a sandbox elsewhere; allowed: one without")
    if environment.message_type != "chat":
        raise Refused(f"environment: {name} has message_type {environment.message_type!r}; allowed: 'chat'")


class VerifiersPlayer(Player):
    """Rows of the data set, those of the probe split apart: the evaluation data set where there is one."""

    def __init__(self, environment: Any, verifiers: Any, options: argparse.Namespace) -> None:
        from verifiers.types import ClientConfig

        self._environment = environment
        self._config = ClientConfig
        self._resolve = _resolver()
        self._seed = options.seed
        self._rows = {split: Rows(*found) for split, found in _splits(environment, options.held_out).items()}
        self.size, self.probes = (len(self._rows[split].places) for split in ("train", "probe"))
        if not self.size:
            raise Refused("environment: its data set has no row that is trained; allowed: at least one")
        self.grouped = bool(getattr(environment.rubric, "has_group_rewards", False))

    async def play(self, index: int, split: str, base_urls: Sequence[str]) -> list[Played]:
        rows = self._rows[split]
        row = rows.data[rows.places[item_at(index, len(rows.places), self._seed)]]
        clients = [self._client(url) for url in base_urls]
        try:
            if self.grouped:
                return await self._group(row, clients)
            return list(await asyncio.gather(*(self._episode(row, client) for client in clients)))
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    async def close(self) -> None:
        await self._environment._teardown()

    def _client(self, base_url: str) -> Any:
        # No retries: a call that was answered would be another one in the session.
        return self._resolve(self._config(api_base_url=base_url, api_key_var="STREAMRL_NO_KEY", max_retries=0))

    async def _episode(self, row: Any, client: Any) -> Played:
        output = await self._environment.run_rollout(dict(row), client, "policy", self._sampling())
        return _played(output.get("reward"), output.get("metrics"), output.get("error"))

    async def _group(self, row: Any, clients: Sequence[Any]) -> list[Played]:
        """Episodes whose rubric sees them all."""
        environment = self._environment
        playing = (environment.rollout(dict(row), client, "policy", self._sampling()) for client in clients)
        states = await asyncio.gather(*playing)
        await environment.rubric.score_group(list(states))
        for state in states:
            await environment.rubric.cleanup(state)
        return [_played(state.get("reward"), state.get("metrics"), state.get("error")) for state in states]

    def _sampling(self) -> dict[str, Any]:
        """The environment's own, which the endpoint takes or passes over."""
        return {name: value for name, value in self._environment.sampling_args.items() if name != "n"}


@dataclass(frozen=True)
class Rows:
    """Those of a data set that belong to a split."""

    data: Any
    places: Sequence[int]


def _splits(environment: Any, held_out: float) -> dict[str, tuple[Any, Sequence[int]]]:
    """For both splits the data set, and the places in it: the evaluation data set has the probes where there is one."""
    data = environment.get_dataset() if _has(environment, "dataset") else []
    if _has(environment, "eval_dataset"):
        probes = environment.get_eval_dataset()
        return {"train": (data, range(len(data))), "probe": (probes, range(len(probes)))}
    apart: dict[bool, list[int]] = {False: [], True: []}
    for place, row in enumerate(data):
        apart[is_held_out(str(row["prompt"]), held_out)].append(place)
    return {"train": (data, apart[False]), "probe": (data, apart[True])}


def _has(environment: Any, name: str) -> bool:
    return getattr(environment, f"{name}_source", None) is not None or getattr(environment, name, None) is not None


def _resolver() -> Any:
    from verifiers.clients import resolve_client

    return resolve_client


def _played(reward: Any, metrics: Any, error: Any) -> Played:
    """A rollout that an error ended has no reward, whatever the rubric makes of what there is."""
    if error is not None and not (name := _name(error)).startswith(EMPTY):
        return Played(failure=name, masked=name.startswith(INFRASTRUCTURE))
    parts = {str(key): float(value) for key, value in (metrics or {}).items()}
    return Played(reward=float(reward or 0.0), parts=parts)


def _name(error: Any) -> str:
    if isinstance(error, BaseException):
        cause = f" -> {described(error.__cause__)}" if error.__cause__ is not None else ""
        return f"{described(error)}{cause}"[:300]
    return str(error.get("error_chain_repr") or error.get("error") or error)[:300]
