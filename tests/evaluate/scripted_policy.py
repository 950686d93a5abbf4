"""A policy whose pass rates are known: an inference handle that honours the interface and draws its answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamrl.engine.client import EngineError
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Completion, Message, Prompt
from streamrl.types import PolicyVersion, VersionSpan

V7 = PolicyVersion(7)


class ScriptedPolicy:
    """Answers "x=" of the task copy by "x" with the chance that `chances` names for x, else by "wrong".

    `lost`: the server cannot be reached. `stuck`: symbols to which no answer comes before the deadline. `others`:
    symbols that another version answers.
    """

    def __init__(
        self,
        chances: dict[str, float],
        *,
        lost: bool = False,
        stuck: str = "",
        others: str = "",
        seed: int = 1,
        version: PolicyVersion = V7,
    ) -> None:
        self.chances = chances
        self.version = version
        self.lost, self.stuck, self.others = lost, stuck, others
        self.random = random.Random(seed)
        self.running = self.most = self.asked = 0

    def __call__(self, *, greedy: bool, deadline: float) -> ScriptedHandle:
        return ScriptedHandle(self, greedy, deadline)

    def draw(self, symbol: str, greedy: bool) -> Completion:
        chance = self.chances[symbol]
        right = chance > 0.5 if greedy else self.random.random() < chance
        return _completion(symbol if right else "wrong", PolicyVersion(8) if symbol in self.others else self.version)


class ScriptedHandle:
    """One handle, as `generate/inference.py` has it."""

    def __init__(self, policy: ScriptedPolicy, greedy: bool, deadline: float) -> None:
        self.failures: list[str] = []
        self._policy, self._greedy, self._deadline = policy, greedy, deadline

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        assert isinstance(prompt, str)
        policy, symbol = self._policy, prompt[0]
        if policy.lost:
            raise EngineError("http://127.0.0.1:1", "/generate", None, "refused")
        policy.asked += 1
        policy.running += 1
        policy.most = max(policy.most, policy.running)
        try:
            await asyncio.sleep(0)
            if symbol in policy.stuck:
                await asyncio.sleep(self._deadline - asyncio.get_running_loop().time())
                self.failures.append("not finished at the deadline")
                return [Completion.failed(np.zeros(2, np.int32))] * n
        finally:
            policy.running -= 1
        return [policy.draw(symbol, self._greedy) for _ in range(n)]

    async def ids_of(self, prompt: Prompt) -> np.ndarray:
        return np.zeros(2, np.int32)

    async def hold_images(self, references: Sequence[str]) -> None: ...

    def cut_prompt(self, prompt: Prompt, cut: Cut) -> None: ...

    prompt_ids: Callable[..., np.ndarray] = None  # type: ignore[assignment]  # not used by tasks of one turn
    added_ids: Callable[..., np.ndarray] = None  # type: ignore[assignment]


def _completion(text: str, version: PolicyVersion) -> Completion:
    length = len(text) + 1  # the end token
    return Completion(
        text=text,
        prompt_ids=np.zeros(2, np.int32),
        output_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(version, 0, length),),
        finish_reason="stop",
    )
