"""A process that hosts a user's task: `python -m streamrl.tasks.host_process PARENT MARK`, started by `host_handle`.

    reader thread ── Call ──▶ event loop: the user's code ── Done, Raised ──▶ worker
        └── Reply ──▶ the caller of the policy (`WorkerPolicy`)

Whatever the user's code does (loop for ever, sleep, exit, crash), it does to this process alone. While it runs, the
number of its call is in the memory MARK, which outlives the process: so the worker knows who ended it. The stack
follows the number, where a signal asked for it or the process crashed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import faulthandler
import functools
import itertools
import math
import mmap
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from streamrl.config.task import TaskConfig, TaskShare
from streamrl.lifeline import die_with
from streamrl.tasks import parsing
from streamrl.tasks.call_clock import CLOCK
from streamrl.tasks.environment import (
    Branch,
    Completion,
    Environment,
    Message,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.failures import (
    INFRASTRUCTURE,
    ScorerLate,
    ScorerLost,
    ScorerUnready,
    describe,
    exceptions_of,
    is_masked,
    text_of,
)
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
    Judgement,
    Ping,
    Pong,
    Raised,
    Ready,
    Refused,
    Reply,
    Task,
    ToProcess,
    ToWorker,
    Unask,
    frame,
    reader,
    travelling,
)
from streamrl.tasks.named import load_named
from streamrl.tasks.registry import build_task
from streamrl.tasks.turns import TurnByTurn
from streamrl.types import PolicyVersion

PROMPTS = 256  # that are kept, so that a prompt is not made again for each of its answers

FIRST_VICTIM = "1000"  # for the kernel, where memory runs out: this process, and not the worker

SETTLE_TIME = 0.2  # seconds in which a call that is cancelled as late may end

_CALL: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)


class PolicyLost(RuntimeError):
    """The policy cannot be reached: the worker knows why, and ends the group itself."""


class Channel:
    """The two pipes. `send` may be called by any thread."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
        self._read = reader(ToProcess)
        self._check = reader(ToWorker)
        self._sending = threading.Lock()

    def send(self, message: Frame) -> None:
        """Raises what `frame` raises, and ValueError for what the worker would not read."""
        written = frame(message)
        if len(written) > LARGEST:
            raise ValueError(f"{len(written)} bytes are too many between a task and its worker; allowed: {LARGEST}")
        self._check(written[HEAD.size :])
        with self._sending:
            self._replies.write(written)
            self._replies.flush()

    def receive(self) -> Any:
        """The next message; None where the worker has closed the pipe."""
        head = self._requests.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        (size,) = HEAD.unpack(head)
        return self._read(self._requests.read(size))


class WorkerPolicy:
    """`Inference` for hosted code: the worker's, over the pipes."""

    def __init__(self, host: Host, number: int) -> None:
        """`number` of the call that it is for."""
        self._host = host
        self._number = number

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        text, messages, ids = _content(prompt)
        options = {"images": list(images), "at_least": at_least, "sampling": sampling}
        asked = self._ask("generate", text=text, messages=messages, ids=ids, n=n, **options)
        return list(_checked(await asyncio.wrap_future(asked)).completions)

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        text, messages, _ = _content(prompt)
        return self._ids("prompt_ids", text=text, messages=messages, tools=list(tools))

    def added_ids(
        self,
        history: Sequence[Message],
        added: str | Sequence[Message],
        last: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        text, messages, _ = _content(added)
        return self._ids("added_ids", text=text, messages=messages, history=list(history), last=last, tools=list(tools))

    def _ids(self, method: Any, **fields: Any) -> np.ndarray:
        ids = _checked(self._ask(method, **fields).result()).ids  # the reader thread brings the reply
        assert ids is not None
        return ids

    def _ask(self, method: Any, **fields: Any) -> concurrent.futures.Future[Reply]:
        return self._host.ask(Ask(number=self._number, request=next(self._host.requests), method=method, **fields))


class Threads(concurrent.futures.ThreadPoolExecutor):
    """Those of `asyncio.to_thread`, which know for which call they run."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._calls: dict[concurrent.futures.Future[Any], int] = {}

    def submit(self, function: Any, /, *given: Any, **named: Any) -> concurrent.futures.Future[Any]:
        future = super().submit(function, *given, **named)
        self._calls[future] = _CALL.get()
        future.add_done_callback(self._calls.pop)
        return future

    def run_for(self, number: int) -> bool:
        return any(call == number and future.running() for future, call in list(self._calls.items()))


class Host:
    """What answers the worker's calls with an environment, or a function."""

    def __init__(self, task: Task, channel: Channel, mark: mmap.mmap) -> None:
        """Load the user's code. Raises whatever that raises."""
        self._channel = channel
        self._mark = mark
        self._timeout, self._limit = task.timeout, task.limit
        self._function = _function(task.function) if task.function else None
        self._environment = _environment(task)
        self._infrastructure = INFRASTRUCTURE
        if (own := self._environment) is not None:
            self._infrastructure = exceptions_of(own.infrastructure, f"task.name: {type(own).__name__}")
        self._prompt = functools.lru_cache(PROMPTS)(self._environment.prompt) if self._environment else None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.requests = itertools.count(1)  # their numbers
        self._replies: dict[int, concurrent.futures.Future[Reply]] = {}
        self._ended = asyncio.Event()
        self._threads = Threads()

    @property
    def about(self) -> About:
        lost = (ScorerLate, ScorerLost, ScorerUnready)
        masked = [kind.__name__ for kind in lost if issubclass(kind, self._infrastructure)]
        environment = self._environment
        if environment is None:
            return About(masked=masked)
        kind, lowest_reward = type(environment), float(environment.lowest_reward)
        if not math.isfinite(lowest_reward):
            raise ValueError(f"task.name: {kind.__name__}.lowest_reward is {lowest_reward}, a finite number is needed")
        return About(
            inline=bool(vars(kind).get("runs_inline", False)),  # said of this very class, not of one that it is made of
            size=environment.size,
            lowest_reward=lowest_reward,
            has_turns=bool(environment.has_turns),
            max_turns=environment.max_turns if isinstance(environment, TurnByTurn) else 0,
            plays=kind.rollout_group is not Environment.rollout_group,
            scores_all=kind.score_all is not Environment.score_all,
            judges_groups=bool(environment.judges_groups),
            asks_itself=bool(environment.asks_itself),
            masked=masked,
        )

    async def run(self) -> None:
        """Answer calls until the worker says End."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._marked)
        loop.set_default_executor(self._threads)
        threading.Thread(target=self._listen, args=(loop,), name="worker", daemon=True).start()
        await self._ended.wait()
        if self._environment is not None:
            await self._environment.close()

    def ask(self, ask: Ask) -> concurrent.futures.Future[Reply]:
        """The reply comes by the reader thread. Who cancels the future asks no longer."""
        reply = self._replies[ask.request] = concurrent.futures.Future()
        reply.add_done_callback(lambda reply: self._unask(ask) if reply.cancelled() else None)
        self._channel.send(ask)
        return reply

    def _unask(self, ask: Ask) -> None:
        self._replies.pop(ask.request, None)
        self._channel.send(Unask(number=ask.number, request=ask.request))

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """The reader thread. A reply goes past the loop, which may wait for it in a call that is not asynchronous."""
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Reply):
                with contextlib.suppress(KeyError, concurrent.futures.InvalidStateError):  # the loop has cancelled it
                    self._replies.pop(message.request).set_result(message)
            else:
                loop.call_soon_threadsafe(self._handle, message)
        os._exit(0)  # the worker is gone

    def _handle(self, message: Any) -> None:
        match message:
            case Call(number=number):
                context = contextvars.copy_context()
                context.run(_CALL.set, number)
                context.run(CLOCK.set, lambda runs: self._channel.send(Clock(number=number, runs=runs)))
                work = asyncio.get_running_loop().create_task(self._answer(message), context=context)
                self._tasks[number] = work
                work.add_done_callback(lambda _: self._tasks.pop(number, None))
            case Cancel(number=number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case Ping():
                self._channel.send(Pong())
            case End():
                self._ended.set()

    async def _answer(self, call: Call) -> None:
        try:
            self._channel.send(await self._done(call))
        except BaseException as error:  # whatever the user's code raises, or gives that does not travel
            masked = is_masked(error, self._infrastructure)
            left = isinstance(error, ScorerLate) and self._threads.run_for(call.number)
            self._channel.send(Raised(number=call.number, text=describe(error), masked=masked, leaves_thread=left))

    async def _done(self, call: Call) -> Done:
        """Raises ScorerLate for code that waits for longer than it may, and gives it up where it refuses to end.

        Code that blocks is ended by the worker.
        """
        plays = call.method in PLAYED
        work = asyncio.create_task(self._play(call) if plays else self._judge(call))
        try:
            if not (await asyncio.wait((work,), timeout=None if plays else self._timeout))[0]:
                work.cancel()
                await asyncio.wait((work,), timeout=SETTLE_TIME)
                late = ScorerLate(f"{call.method} took more than {self._limit}={self._timeout:g} s")
                raise late.with_traceback(_raised_in(work))
            return work.result()
        finally:
            work.cancel()

    async def _judge(self, call: Call) -> Done:
        environment, number = self._own, call.number
        if call.method == "prompt":
            return Done(number=number, prompt=travelling(self._made(call)))
        prompt, completions = self._made(call), call.completions
        match call.method:
            case "score":
                return Done(number=number, judgements=[_judgement(await environment.score(prompt, completions[0]))])
            case "score_all":
                rollouts = await environment.score_all(prompt, completions)
                if any(rollout.branches for rollout in rollouts):
                    raise ValueError("score_all judges the answers that it is given; rollout_group gives branches")
                return Done(number=number, judgements=[_of_rollout(rollout) for rollout in rollouts])
            case "observation":
                assert isinstance(environment, TurnByTurn)
                text, messages, _ = _content(await environment.observation(prompt, completions))
                return Done(number=number, text=text, messages=messages)
            case _:
                assert isinstance(environment, TurnByTurn)
                return Done(number=number, judgements=[_judgement(await environment.score_turns(prompt, completions))])

    async def _play(self, call: Call) -> Done:
        """What takes as long as the policy takes: the worker has its eye on the time between its requests."""
        if call.method == "function":
            assert self._function is not None
            return Done(number=call.number, value=await self._function(*call.arguments))
        policy = WorkerPolicy(self, call.number)
        rollouts = await self._own.rollout_group(policy, self._made(call), call.size)
        return Done(number=call.number, rollouts=[_plain(rollout) for rollout in rollouts])

    @property
    def _own(self) -> Environment:
        assert self._environment is not None
        return self._environment

    def _made(self, call: Call) -> Prompt:
        assert self._prompt is not None
        return call.prompt if call.prompt is not None else self._prompt(call.index)

    def _marked(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """A task whose steps say for which call they run. Tasks that the user's code makes inherit its call."""
        number = _CALL.get() if context is None else context.get(_CALL, 0)
        steps = _stepping(coroutine, number, self._mark) if number else coroutine
        return asyncio.Task(steps, loop=loop, context=context)


def _environment(task: Task) -> Environment | None:
    """As the worker would have it; None where a function is hosted."""
    if task.share is None:
        return None
    environment = build_task(TaskShare.model_validate(task.share), task.seed, task.split)
    parsing.apply(environment, TaskConfig.model_validate(task.run))
    return environment


def _function(path: str) -> Any:
    """What answers calls: a function, or the method `call` of a class."""
    named = load_named(path, "function")
    return named().call if isinstance(named, type) else named


_STEPS = itertools.count(1)


class _Steps:
    """A coroutine that marks each of its steps, from one `await` to the next."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, mark: mmap.mmap) -> None:
        self._coroutine, self._number, self._mark = coroutine, number, mark
        self._pid = os.getpid()

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            steps = next(_STEPS)
            MARK.pack_into(self._mark, 0, self._number, steps)
            try:
                waits = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            except (SystemExit, KeyboardInterrupt) as end:  # they would end the event loop with all its calls
                raise ScorerLost(repr(end)).with_traceback(end.__traceback__) from None
            finally:
                if os.getpid() != self._pid:  # a fork that comes back: the answer is its parent's
                    os._exit(0)
                MARK.pack_into(self._mark, 0, 0, steps)
            value = error = None
            try:
                value = yield waits
            except BaseException as thrown:  # a cancellation, which is the coroutine's to handle
                error = thrown


def _raised_in(work: asyncio.Task[Any]) -> TracebackType | None:
    """The place at which a task was cancelled; None where it goes on."""
    try:
        work.result()
    except BaseException as error:
        return error.__traceback__
    return None


async def _stepping(coroutine: Coroutine[Any, Any, Any], number: int, mark: mmap.mmap) -> Any:
    return await _Steps(coroutine, number, mark)


def _content(value: Any) -> tuple[str | None, list[Message] | None, np.ndarray | None]:
    """A text, messages or token ids, as the field in which it travels."""
    if isinstance(value, np.ndarray):
        return None, None, value
    return (value, None, None) if value is None or isinstance(value, str) else (None, list(value), None)


def _checked(reply: Reply) -> Reply:
    if reply.lost is not None:
        raise PolicyLost(reply.lost)
    if reply.refused is not None:
        raise ValueError(reply.refused)
    return reply


def _judgement(score: Score) -> Judgement:
    check_reward(score)
    return Judgement(float(score.reward), {str(name): float(part) for name, part in score.parts.items()})


def _of_rollout(rollout: Rollout) -> Judgement:
    parts = {str(name): float(part) for name, part in rollout.parts.items()}
    return Judgement(float(rollout.reward), parts, rollout.failure, rollout.masked)


def _plain(rollout: Rollout) -> Rollout:
    """Without types of the user's own."""
    fields = _of_rollout(rollout)
    return Rollout(
        completion=rollout.completion,
        reward=fields.reward,
        parts=fields.parts,
        failure=fields.failure,
        masked=fields.masked,
        branches=tuple(
            Branch(completion=each.completion, reward=None if each.reward is None else float(each.reward))
            for each in rollout.branches
        ),
    )


def main() -> None:
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all: the worker decides
    Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
    os.lseek(memory, MARK.size, os.SEEK_SET)
    faulthandler.register(signal.SIGUSR1, file=memory, all_threads=False)
    faulthandler.enable(file=memory, all_threads=False)
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the user's code prints is no frame: it goes into the worker's log
    try:
        host = Host(channel.receive(), channel, mmap.mmap(memory, MARK.size))
        channel.send(Ready(about=host.about))
    except BaseException as error:  # whatever a module of the user's raises while it is loaded
        channel.send(Refused(reason=text_of(error) if type(error) is ValueError else describe(error)))
        return
    asyncio.run(host.run())


if __name__ == "__main__":
    main()
