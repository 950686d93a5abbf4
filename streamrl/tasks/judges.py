"""Processes that judge answers and are killed when they take too long.

    Judges (asyncio, in the worker) ── one JSON line ──▶ python -m MODULE PARENT MEMORY ...
                                    ◀── one JSON line ──   (in its main thread: `judge_lines`)

Only a kill from outside bounds a computation inside one C call. A judge ends with its worker, also in the middle of
one, so that none outlives it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

from streamrl.lifeline import die_with, kill_group
from streamrl.tasks.failures import INFRASTRUCTURE, ScorerLate, ScorerLost, ScorerRaised, ScorerUnready, describe

# Bytes of address space of a judge: enough for sympy, and a tower of powers ends as a MemoryError.
MEMORY = 4 << 30

# Bytes of the longest line from a judge; its replies are far shorter.
_LINE = 1 << 20


class Judges:
    """A pool of judges, started when they are first needed.

    Usage:
        async with Judges("streamrl.tasks.math_reward", processes=2, timeout=5.0, start_timeout=60.0) as judges:
            await judges.ask({"text": "\\\\boxed{1/2}", "gold": "0.5"})  # {'right': True, 'readable': True}
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        processes: int,
        timeout: float,
        start_timeout: float,
        memory: int = MEMORY,
    ) -> None:
        """`module`: whose main calls `judge_lines`; `arguments`: its own, behind those that `judge_lines` takes.

        timeout, start_timeout: seconds for one answer, and for a process to be ready. memory: bytes of address space.
        """
        self._command = (sys.executable, "-m", module, str(os.getpid()), str(memory), *arguments)
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._judges: set[asyncio.subprocess.Process] = set()
        self._idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(processes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """The living judges."""
        return [judge.pid for judge in self._judges]

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """A judge's reply to a question of JSON types (others become text).

        Raises ScorerRaised where it raises, ScorerLate where it hangs, ScorerLost where it ends, and ScorerUnready
        where none can be started. One that hangs is killed.
        """
        async with self._places:
            judge = await self._acquire()
            try:
                reply = await self._exchange(judge, question, self._timeout)
            except BaseException:  # cancelled or failed: its reply may still come, so it cannot be asked again
                await self._end(judge)
                raise
            self._idle.append(judge)
        if "error" in reply:
            raise ScorerRaised(reply["error"], masked=reply["masked"])
        return reply

    async def close(self) -> None:
        """Kill and reap every judge. May be called twice."""
        self._idle.clear()
        for judge in list(self._judges):
            await self._end(judge)

    async def _acquire(self) -> asyncio.subprocess.Process:
        """An idle judge that still lives, or a new one."""
        while self._idle:
            judge = self._idle.pop()
            if judge.returncode is None:
                return judge
            self._judges.discard(judge)
        return await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            judge = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE,
                start_new_session=True,  # so that whatever it starts can be ended with it
            )
        except OSError as error:
            raise ScorerUnready(f"no judge could be started: {error}") from None
        self._judges.add(judge)
        try:
            ready = await self._exchange(judge, None, self._start_timeout)  # once its libraries are loaded
            if "error" in ready:
                raise ScorerUnready(ready["error"])
        except (ScorerLate, ScorerLost) as error:
            await self._end(judge)
            raise ScorerUnready(f"{error}, before it was ready") from None
        except BaseException:
            await self._end(judge)
            raise
        return judge

    async def _exchange(
        self, judge: asyncio.subprocess.Process, question: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any]:
        assert judge.stdin is not None
        assert judge.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                judge.stdin.write(json.dumps(question, default=str).encode() + b"\n")
                await judge.stdin.drain()
                line = await judge.stdout.readline()
        except TimeoutError:
            raise ScorerLate(f"judging took more than {timeout:g} s") from None
        except ConnectionError as error:
            raise ScorerLost(f"the judge has ended: {error}") from None
        except ValueError:
            raise ScorerRaised(f"the reply has more than {_LINE} bytes", masked=False) from None
        if not line:
            raise ScorerLost("the judge has ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def _end(self, judge: asyncio.subprocess.Process) -> None:
        self._judges.discard(judge)
        kill_group(judge.pid)
        await judge.wait()


def judge_lines(prepare: Callable[[Sequence[str]], Callable[..., dict[str, Any]]]) -> None:
    """The main of a judge: answers each line of standard input until it ends.

    `prepare` is called once with the arguments behind PARENT and MEMORY, and loads what the judge needs; what it
    returns is called with the keys of each question. What either raises is the reply; where its function has an
    attribute `infrastructure`, these are the exceptions that say nothing of the answer.
    """
    parent, memory, *arguments = sys.argv[1:]
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all: the worker decides
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    me = os.getpid()
    questions, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints is not a reply
    judge: Callable[..., dict[str, Any]] | None = None
    for line in questions:
        question = json.loads(line)
        try:
            judge = judge or prepare(arguments)
            reply = _line({} if question is None else judge(**question))
        except BaseException as error:  # whatever a library or a user's code does with a strange answer, it is a reply
            kinds = getattr(judge, "infrastructure", INFRASTRUCTURE)
            masked = isinstance(error, (kinds, SystemExit, KeyboardInterrupt))
            reply = _line({"error": describe(error), "masked": masked})
        if os.getpid() != me:  # a fork that comes back: the reply is its parent's
            os._exit(0)
        replies.write(reply)


def _line(reply: dict[str, Any]) -> bytes:
    """Raises TypeError or ValueError for what is no JSON, or no UTF-8."""
    return json.dumps(reply, ensure_ascii=False).encode() + b"\n"
