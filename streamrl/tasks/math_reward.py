"""Mathematical equality of two answers, judged by math-verify in processes of its own.

math-verify stops itself with signal.alarm, which works in a main thread only and never interrupts a computation
inside one C call: its own timeouts are off, and the judges' deadline bounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.tasks.judges import Judges, judge_lines


class MathReward(Judges):
    """The judges of mathematics, started when they are first needed.

    Usage:
        async with MathReward(processes=2, timeout=5.0, start_timeout=60.0) as judge:
            await judge.is_right("so it is \\\\boxed{1/2}", gold="0.5")  # True
    """

    def __init__(self, *, processes: int, timeout: float, start_timeout: float, memory: int = 4 << 30) -> None:
        """Of `memory` bytes, 4 GiB are enough for sympy, and a tower of powers ends as a MemoryError."""
        super().__init__(
            "streamrl.tasks.math_reward",
            processes=processes,
            timeout=timeout,
            start_timeout=start_timeout,
            memory=memory,
        )

    async def is_right(self, text: str, gold: str) -> bool:
        """Whether the answer in `text` equals `gold`. Raises as `ask` does."""
        return await self.verdict(text, gold) is True

    async def verdict(self, text: str, gold: str, *, as_text: bool = False) -> bool | None:
        """As `is_right`; None where `text` holds nothing that can be read as mathematics.

        as_text: `gold` is compared with the formula that is found in `text`, as the text that both are.
        """
        reply = await self.ask({"text": text, "gold": gold, "as_text": as_text})
        return reply["right"] if reply["readable"] else None


def prepare(arguments: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """Load math-verify. Returns the judge of one answer; it raises ValueError for a `gold` that is no mathematics."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # its warnings that the timeouts are off

    def judge(text: str, gold: str, as_text: bool = False) -> dict[str, Any]:
        if as_text:
            found = parse(text, parsing_timeout=None)
            return {"right": bool(verify(gold, found, timeout_seconds=None)), "readable": True}
        target = parse(_formula(gold), parsing_timeout=None)
        if not target:
            raise ValueError(f"the right answer {gold[:80]!r} is not mathematics")
        answer = parse(text, parsing_timeout=None)
        right = bool(verify(target, answer, timeout_seconds=None))
        return {"right": right, "readable": right or any(not isinstance(form, str) for form in answer)}

    judge("1", "1")  # loads the libraries load at their first use
    return judge


def _formula(gold: str) -> str:
    """The right answer as LaTeX: math-verify looks for formulas between marks."""
    return gold if "$" in gold or "\\boxed" in gold else f"${gold}$"


if __name__ == "__main__":
    judge_lines(prepare)
