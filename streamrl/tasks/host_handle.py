"""One process that runs a user's task, as the worker sees it: its calls, its deadline, its end.

    STARTING ─▶ READY ─▶ ENDED
                  └─▶ RETIRES ─▶ ENDED

A process is ended that neither answers a Ping nor comes to an `await` for `task.scoring.timeout` seconds: its event
loop is blocked. Of the calls that it had open, the one whose code was running has failed; of the others it is not known
that they have ended it (`HostEnded`). A call that may ask the policy has failed where it asks nothing for as long by
its clock (`call_clock.py`). A process in which a late call has left a thread retires: it gets no further call, and is
ended after those that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from streamrl.config.task import ScoringConfig
from streamrl.lifeline import exit_text, kill_group
from streamrl.tasks.environment import Inference
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerRaised, ScorerUnready, place_in
from streamrl.tasks.host_wire import (
    HEAD,
    LARGEST,
    MARK,
    PLAYED,
    About,
    Ask,
    Call,
    Cancel,
    Clock,
    Done,
    End,
    Frame,
    Ping,
    Pong,
    Raised,
    Ready,
    Refused,
    Reply,
    Task,
    ToWorker,
    Unask,
    frame,
    reader,
)

log = logging.getLogger(__name__)

EXIT_TIME = 1.0  # seconds that a process may live on without its pipe, and its pipe without it

CLOSE_TIME = 5.0  # seconds that the user's `close` may take

ROUNDS = 8  # pings within the deadline: a worker that was itself held up does not take that for the process's fault

DUMP_TIME = 0.2  # seconds for the stack of a blocked process to be written

_READ = reader(ToWorker)


class HostEnded(Exception):
    """The process has ended, and it is not known that this call has ended it."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


@dataclass(slots=True, eq=False)
class _Open:
    """A call that has no answer yet."""

    answer: asyncio.Future[Done]
    inference: Inference | None  # for one that may ask the policy
    is_played: bool  # one of PLAYED: it is ended when it is quiet for too long
    runs: bool = True  # its clock: it does not wait for another call's turn
    quiet: int = 0  # rounds of its clock without a request to the policy
    asking: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by the numbers of its requests
    lost: Exception | None = None  # why the policy could not be reached


class Host:
    """One process. `close` it."""

    def __init__(self, task: Task, name: str, settings: ScoringConfig) -> None:
        """`name` of the task, for messages."""
        self.about: asyncio.Future[About] = asyncio.get_running_loop().create_future()
        self.ended = False
        self.retires = False  # a late call has left a thread in it
        self.load = 0  # calls that wait for it, or for an answer
        self._task, self._name, self._settings = task, name, settings
        self._period = settings.timeout / ROUNDS
        self._memory, self._mark = _shared_mark()
        self._process: asyncio.subprocess.Process | None = None
        self._calls: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._unanswered = 0  # rounds since a Ping
        self._moved = 0, 0  # steps that the process had made, and rounds since that Ping, when it last made one
        self._why: Exception | None = None  # it is ended by us
        self._closing = False
        self._running = asyncio.create_task(self._run())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(
        self, call: Call, inference: Inference | None = None, begun: Callable[[], None] = lambda: None
    ) -> Done:
        """Make a call. Raises ScorerRaised, ScorerLate, ScorerLost, ScorerUnready, HostEnded, or what `inference` does.

        Cancelled, the call is cancelled there too. `begun` is called once the process is ready for it.
        """
        self.load += 1
        try:
            await asyncio.shield(self.about)
            if self.ended:
                raise HostEnded(ScorerLost(f"the process of {self._name} has ended"))
            begun()
            return await self._ask(call, inference)
        finally:
            self.load -= 1

    async def _ask(self, call: Call, inference: Inference | None) -> Done:
        number = next(self._numbers)
        opened = self._calls[number] = _Open(
            asyncio.get_running_loop().create_future(), inference, is_played=call.method in PLAYED
        )
        try:
            self._send(msgspec.structs.replace(call, number=number))
            return await opened.answer
        except asyncio.CancelledError:
            self._send(Cancel(number=number))
            raise
        finally:
            del self._calls[number]
            for task in opened.asking.values():
                task.cancel()

    async def close(self) -> None:
        """End the process: by its own means, or by a signal."""
        self._closing = True
        started = await self._started()
        if not self._running.done() and self.about.done():
            self._send(End())
            await asyncio.wait((self._running,), timeout=CLOSE_TIME)
        if not self._running.done():
            await self._end()
            await asyncio.wait((self._running,))
        _kill_all(started)

    async def retire(self) -> None:
        """End the process once it has no call."""
        while self.load:
            await asyncio.sleep(self._period)
        await self.close()

    async def _run(self) -> None:
        """The process from its start to its end."""
        try:
            await self._start()
            watching = asyncio.create_task(self._watch())
            try:
                while True:
                    self._handle(await self._receive())
            finally:
                watching.cancel()
        except asyncio.IncompleteReadError as error:
            log.debug("%s: %s", self._name, error)
        except OSError as error:
            if self._process is None:
                self._why = ScorerUnready(f"no process could be started for {self._name}: {error}")
        except (ValueError, msgspec.MsgspecError) as error:
            self._why = ScorerLost(f"the process of {self._name} sent what cannot be read: {error}")
        finally:
            await self._after()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamrl.tasks.host_process", str(os.getpid()), str(self._memory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._memory,),
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
        if self._closing:
            self._process.kill()
        self._send(self._task)
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                first = await self._receive()
        except TimeoutError:
            limit = self._settings.start_timeout
            self._why = ScorerUnready(f"{self._name} was not ready in task.scoring.start_timeout={limit:g} s")
            await self._kill()
            raise asyncio.IncompleteReadError(b"", None) from None
        match first:
            case Ready(about=about):
                self.about.set_result(about)
            case Refused(reason=reason):
                self.about.set_exception(ValueError(reason))
                self.about.exception()  # it is known, whether or not anybody waits

    def _handle(self, message: Any) -> None:
        if isinstance(message, Raised) and message.leaves_thread:
            self.retires = True
        match message:
            case Done(number=number) if (opened := self._calls.get(number)) and not opened.answer.done():
                opened.answer.set_result(message)
            case Raised(number=number) if (opened := self._calls.get(number)) and not opened.answer.done():
                opened.answer.set_exception(opened.lost or ScorerRaised(message.text, masked=message.masked))
            case Ask(number=number) if (opened := self._calls.get(number)) and opened.inference is not None:
                asking = opened.asking
                task = asking[message.request] = asyncio.create_task(self._reply(opened, opened.inference, message))
                task.add_done_callback(lambda _: asking.pop(message.request, None))
            case Unask(number=number) if opened := self._calls.get(number):
                if (asked := opened.asking.get(message.request)) is not None:
                    asked.cancel()
            case Clock(number=number) if opened := self._calls.get(number):
                opened.runs, opened.quiet = message.runs, 0
            case Pong():
                self._unanswered = 0

    async def _reply(self, opened: _Open, inference: Inference, ask: Ask) -> None:
        """What the policy, or its tokenizer, says to hosted code."""
        try:
            reply = await _asked(inference, ask)
        except ValueError as error:
            reply = Reply(request=ask.request, refused=str(error))
        except Exception as error:  # the policy is lost: the call ends with this, whatever hosted code makes of it
            opened.lost = error
            reply = Reply(request=ask.request, lost=f"{type(error).__name__}: {error}")
        opened.quiet = 0
        self._send(reply)

    async def _watch(self) -> None:
        """End the process when its event loop is blocked, and a call that asks the policy nothing for too long."""
        while True:
            await asyncio.sleep(self._period)
            assert self._process is not None
            assert self._process.stdout is not None
            if self._process.returncode is not None:  # a fork of it holds its pipe
                self._process.stdout.feed_eof()
                return
            _, steps = MARK.unpack_from(self._mark, 0)
            if self._unanswered == 0 or steps != self._moved[0]:
                self._moved = steps, self._unanswered
            if self._unanswered - self._moved[1] > ROUNDS:
                await self._end_late()
                return
            if self._unanswered == 0 and self._calls:
                self._send(Ping())
            is_blocked = self._unanswered > 1
            if self._unanswered or self._calls:
                self._unanswered += 1
            for number, opened in list(self._calls.items()):
                if not is_blocked:
                    is_quiet = opened.is_played and opened.runs and not opened.asking
                    opened.quiet = opened.quiet + 1 if is_quiet else 0
                if opened.quiet > ROUNDS and not opened.answer.done():
                    opened.answer.set_exception(self._late(""))
                    self._send(Cancel(number=number))

    def _late(self, place: str) -> ScorerLate:
        return ScorerLate(f"{self._name} took more than {self._task.limit}={self._task.timeout:g} s{place}")

    async def _end_late(self) -> None:
        assert self._process is not None
        self._why = self._late("")
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # it writes where it is
        await asyncio.sleep(DUMP_TIME)
        self._why = self._late(self._place())
        log.warning("%s: process %d is ended", self._why, self._process.pid)
        await self._end()

    async def _end(self) -> None:
        """Kill the process, and end its pipe, which a fork of it may hold that nobody knows."""
        await self._kill()
        await asyncio.wait((self._running,), timeout=EXIT_TIME)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.feed_eof()

    async def _kill(self) -> None:
        """The process, and whatever it has started, also where it has ended itself."""
        if self._process is None:
            return
        started = await self._started()
        kill_group(self._process.pid)
        _kill_all(started)

    async def _started(self) -> list[psutil.Process]:
        """What the process has started, sessions of their own included; of one that has ended nobody knows."""
        if self._process is None or self._process.returncode is not None:
            return []
        return await asyncio.to_thread(_descendants, self._process.pid)

    async def _after(self) -> None:
        """The process has ended: tell everyone who waits for it."""
        self.ended = True
        ended = await self._ended()
        why = self._why or ScorerLost(f"the process of {self._name} has ended: {ended}{self._place()}")
        guilty, _ = MARK.unpack_from(self._mark, 0)
        if not self.about.done():
            self.about.set_exception(why if isinstance(why, ScorerUnready) else ScorerUnready(str(why)))
            self.about.exception()
        for number, opened in self._calls.items():
            if not opened.answer.done():
                opened.answer.set_exception(why if number == guilty else HostEnded(why))
        self._mark.close()
        os.close(self._memory)

    async def _ended(self) -> str:
        """How, once it has ended by itself or by a signal, and whatever is left of what it has started."""
        if self._process is None:
            return "it could not be started"
        waiting = asyncio.create_task(self._process.wait())  # also until nobody holds its pipes
        await asyncio.wait((waiting,), timeout=EXIT_TIME)
        await self._kill()
        await asyncio.wait((waiting,), timeout=EXIT_TIME)
        waiting.cancel()
        code = self._process.returncode
        return "it outlives its signal" if code is None else exit_text(code)

    def _place(self) -> str:
        """Where the process was, if it has reported it."""
        place = place_in(os.pread(self._memory, 1 << 16, MARK.size).decode(errors="replace"))
        return f" ({place})" if place else ""

    def _send(self, message: Frame) -> None:
        pipe = None if self.ended or self._process is None else self._process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.write(frame(message))

    async def _receive(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        (size,) = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
        if size > LARGEST:
            raise ValueError(f"{size} bytes; allowed: {LARGEST}")
        return _READ(await self._process.stdout.readexactly(size))


def _shared_mark() -> tuple[int, mmap.mmap]:
    """Memory that the process shares: its descriptor, and its bytes here. Raises OSError."""
    memory = os.memfd_create("streamrl-task")
    try:
        os.ftruncate(memory, MARK.size)
        return memory, mmap.mmap(memory, MARK.size)
    except OSError:
        os.close(memory)
        raise


async def _asked(inference: Inference, ask: Ask) -> Reply:
    content: Any = ask.text if ask.text is not None else ask.messages if ask.messages is not None else ask.ids
    tools: dict[str, Any] = {"tools": ask.tools} if ask.tools else {}
    match ask.method:
        case "generate":
            completions = await inference.generate(
                content, ask.n, images=ask.images, at_least=ask.at_least, **ask.sampling
            )
            return Reply(request=ask.request, completions=completions)
        case "prompt_ids":
            return Reply(request=ask.request, ids=inference.prompt_ids(content, **tools))
        case "added_ids":
            return Reply(request=ask.request, ids=inference.added_ids(ask.history, content, ask.last, **tools))


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except (psutil.NoSuchProcess, OSError):  # no descriptor to look with
        return []


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
