"""Gymnasium environments whose observations and actions are text.

    reset(seed) ─▶ text ─▶ policy ─▶ step(its answer) ─▶ text ─▶ policy ─▶ ... ─▶ terminated, truncated or max_turns

The reward of an episode is the sum of its steps' rewards; numbers of the last step's `info` are its parts.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamrl.tasks.foreign.player import Played, Player, Refused, described, load_named, option
from streamrl.tasks.foreign.policy import Policy
from streamrl.tasks.order import episode_seed


def _is_number(value: Any) -> bool:
    """Python's, or one of NumPy's."""
    return isinstance(value.item() if getattr(value, "shape", None) == () else value, (bool, int, float))


def load(options: argparse.Namespace) -> Player:
    """Make one environment and reset it. Raises Refused for one that does not speak text."""
    try:
        import gymnasium
    except ImportError as error:
        raise Refused(f"python: {described(error)}; allowed: an interpreter with the package gymnasium") from None
    name: str = options.environment
    make: Callable[[], Any]
    if ".py:" in name:
        named = load_named(name)
        if isinstance(named, type) and not issubclass(named, gymnasium.Env):
            raise Refused(f"environment: {name} is no gymnasium.Env; allowed: path/file.py:Class, or a registered id")
        make = lambda: named(**options.options)  # noqa: E731
    else:
        make = lambda: gymnasium.make(name, **options.options)  # noqa: E731
    return GymnasiumPlayer(make, gymnasium.spaces.Text, options)


class GymnasiumPlayer(Player):
    """Environments are made when they are needed, and used again."""

    def __init__(self, make: Callable[[], Any], text: type, options: argparse.Namespace) -> None:
        self._make = make
        self._seed = options.seed
        self._chat = bool(option(options, "chat", True))
        self._system = option(options, "system", None)
        self._max_turns = int(option(options, "max_turns", 16))
        self._threads = ThreadPoolExecutor(int(option(options, "parallel", 64)), "episode")
        self._free: list[Any] = []
        self._lock = threading.Lock()
        first = make()
        for name, space in (("observation_space", first.observation_space), ("action_space", first.action_space)):
            if not isinstance(space, text):
                first.close()
                raise Refused(f"environment: its {name} is {str(space)[:80]}; allowed: gymnasium.spaces.Text")
        self._free.append(first)

    async def play(self, index: int, split: str, base_urls: Sequence[str]) -> list[Played]:
        loop = asyncio.get_running_loop()
        seed = episode_seed(self._seed, split, index)
        playing = (loop.run_in_executor(self._threads, self._episode, seed, url) for url in base_urls)
        return list(await asyncio.gather(*playing))

    async def close(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for environment in free:
            environment.close()

    def _episode(self, seed: int, base_url: str) -> Played:
        """One episode. An environment that raised is not used again."""
        with self._lock:
            environment = self._free.pop() if self._free else None
        try:
            if environment is None:
                environment = self._make()
            played = self._steps(environment, seed, Policy(base_url, chat=self._chat, system=self._system))
        except Exception as error:  # whatever the environment raises costs the sample
            return Played(failure=described(error))
        with self._lock:
            self._free.append(environment)
        return played

    def _steps(self, environment: Any, seed: int, policy: Policy) -> Played:
        observation, info = environment.reset(seed=seed)
        total, turns = 0.0, 0
        while turns < self._max_turns:
            said = policy.answer(str(observation))
            observation, reward, terminated, truncated, info = environment.step(said)
            total += float(reward)
            turns += 1
            if terminated or truncated:
                break
        parts = {str(name): float(value) for name, value in info.items() if _is_number(value)}
        return Played(reward=total, parts={**parts, "turns": float(turns)})
