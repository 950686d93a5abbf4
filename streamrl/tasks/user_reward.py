"""A reward function of the user's, called in processes of its own.

    def reward(text: str, answer: str, row: dict, finish_reason: str) -> float | dict[str, float]: ...

A mapping gives the reward under `reward`, and whatever else it names as parts for the metrics. The function may be
`async`. It may raise: its answer has the lowest reward then. It may hang, exit or eat memory: that costs its sample.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.tasks.environment import Score
from streamrl.tasks.failures import exceptions_of
from streamrl.tasks.judges import MEMORY, Judges, judge_lines
from streamrl.tasks.named import load_named

_MODULE = "streamrl.tasks.user_reward"

_CHECK = "--check"  # in place of the target: the function is loaded, and nothing is judged

# What a function is given, by these names.
GIVEN = ("text", "answer", "row", "finish_reason")


class UserReward(Judges):
    """The judges that hold the function `target`: `package.module:function`, or `path/file.py:function`."""

    def __init__(
        self, target: str, *, processes: int, timeout: float, start_timeout: float, memory: int = MEMORY
    ) -> None:
        super().__init__(
            _MODULE, [target], processes=processes, timeout=timeout, start_timeout=start_timeout, memory=memory
        )

    async def score(self, text: str, answer: str, row: dict[str, Any], finish_reason: str) -> Score:
        """What the function says. Raises as `ask` does, ScorerRaised also for a function that gives no number."""
        reply = await self.ask({"text": text, "answer": answer, "row": row, "finish_reason": finish_reason})
        return Score(reward=reply["reward"], parts=reply["parts"])


def check_target(target: str, timeout: float, names: Sequence[str] = ()) -> None:
    """Load the function once, in a process of its own. Raises ValueError with its reason, on one line.

    names: of the arguments that it must take; none: it is called otherwise.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, _CHECK, target, *names],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"not loaded in {timeout:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200])


def load_function(target: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that `target` names. Raises ValueError, ImportError, OSError, or what its module raises.

    ValueError also for one that cannot be called with these names.
    """
    function: Callable[..., Any] = load_named(target, "function")
    if names:
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ValueError(f"it is called with {', '.join(names)}: {error}") from None
    if hasattr(function, "infrastructure"):  # the user's word on which exceptions say nothing of the answer
        exceptions_of(function.infrastructure, target.rpartition(":")[2])
    return function


def prepare(arguments: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """Load the function. Returns what calls it with the keys of a question."""
    function = load_function(arguments[0])
    runner = asyncio.Runner()

    def judge(**question: Any) -> dict[str, Any]:
        given = function(**question)
        given = runner.run(given) if inspect.iscoroutine(given) else given
        values = dict(given) if isinstance(given, dict) else {"reward": given}
        if "reward" not in values:
            raise ValueError(f"the mapping has no 'reward', but {', '.join(map(repr, values)) or 'nothing'}")
        reward = float(values.pop("reward"))
        return {"reward": reward, "parts": {str(key): float(value) for key, value in values.items()}}

    if hasattr(function, "infrastructure"):
        judge.infrastructure = exceptions_of(function.infrastructure, "")  # type: ignore[attr-defined]
    return judge


if __name__ == "__main__":
    if sys.argv[1] == _CHECK:
        load_function(sys.argv[2], sys.argv[3:])
    else:
        judge_lines(prepare)
