"""Mathematical equality of two answers, judged in processes that are killed when they take too long.

    MathReward (asyncio, in the worker) ── one JSON line ──▶ python -m streamrl.tasks.math_reward
                                        ◀── one JSON line ──   (math-verify, in its main thread)

math-verify stops itself with signal.alarm, which works in a main thread only and never interrupts a
computation inside one C call; only a kill from outside bounds both. A judge ends with its standard
input, so that none outlives its worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

log = logging.getLogger(__name__)

_MEMORY = 4 << 30
# Bytes of address space of a judge: enough for sympy, and a tower of powers ends as a MemoryError.

_LINE = 1 << 20
# Bytes of the longest line from a judge; its replies are far shorter.

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class ScoringFailed(RuntimeError):
    """An answer that could not be judged: it hung, it broke the judge, or the right answer is unreadable."""


class MathReward:
    """A pool of judges, started when they are first needed.

    >>> async with MathReward(processes=2, timeout=5.0, start_timeout=60.0) as judge:
    ...     await judge.is_right("so it is \\\\boxed{1/2}", gold="0.5")
    True
    """

    def __init__(self, *, processes: int, timeout: float, start_timeout: float) -> None:
        """`timeout`, `start_timeout`: seconds for one answer, and for a process to be ready."""
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._judges: set[asyncio.subprocess.Process] = set()
        self._idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(processes)

    async def __aenter__(self) -> MathReward:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """The living judges."""
        return [judge.pid for judge in self._judges]

    async def is_right(self, text: str, gold: str) -> bool:
        """Whether the answer in `text` equals `gold`. Raises ScoringFailed; the judge that hung is killed."""
        async with self._places:
            judge = await self._take()
            try:
                reply = await self._ask(judge, {"text": text, "gold": gold}, self._timeout)
            except BaseException:  # cancelled or failed: its reply may still come, so it cannot be asked again
                await self._end(judge)
                raise
            self._idle.append(judge)
        if "error" in reply:
            raise ScoringFailed(reply["error"])
        return reply["right"]

    async def close(self) -> None:
        """Kill and reap every judge. May be called twice."""
        self._idle.clear()
        for judge in list(self._judges):
            await self._end(judge)

    async def _take(self) -> asyncio.subprocess.Process:
        """An idle judge that still lives, or a new one."""
        while self._idle:
            judge = self._idle.pop()
            if judge.returncode is None:
                return judge
            self._judges.discard(judge)
        return await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        judge = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamrl.tasks.math_reward", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE,
        )
        self._judges.add(judge)
        try:
            await self._ask(judge, {"text": "1", "gold": "1"}, self._start_timeout)  # loads the libraries
        except BaseException:
            await self._end(judge)
            raise
        return judge

    async def _ask(self, judge: asyncio.subprocess.Process, question: dict[str, str], timeout: float) -> dict[str, Any]:
        assert judge.stdin is not None
        assert judge.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                judge.stdin.write(json.dumps(question).encode() + b"\n")
                await judge.stdin.drain()
                line = await judge.stdout.readline()
        except TimeoutError:
            raise ScoringFailed(f"judging took more than {timeout:g} s") from None
        except ConnectionError as error:
            raise ScoringFailed(f"the judge has ended: {error}") from None
        if not line:
            raise ScoringFailed("the judge has ended")
        return json.loads(line)

    async def _end(self, judge: asyncio.subprocess.Process) -> None:
        self._judges.discard(judge)
        if judge.returncode is None:
            judge.kill()
        await judge.wait()


def judge_lines(parent: int) -> None:
    """The judge: answers each line of standard input until it ends.

    Sources of `parse` and `verify`: math-verify (Hugging Face), with its own timeouts off: see above.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also in the middle of a C call
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all: the worker decides
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is not a reply
    for line in sys.stdin:
        print(json.dumps(_judge(**json.loads(line))), file=replies)


def _judge(text: str, gold: str) -> dict[str, Any]:
    from math_verify import parse, verify

    try:
        target = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
        if not target:
            return {"error": f"the right answer {gold[:80]!r} is not mathematics"}
        answer = parse(text, parsing_timeout=None)
        return {"right": bool(verify(target, answer, timeout_seconds=None))}
    except Exception as error:  # whatever the libraries do with a strange answer, it is a reply
        return {"error": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    judge_lines(parent=int(sys.argv[1]))
