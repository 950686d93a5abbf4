"""The processes that run a user's task for a worker: started when they are needed, and replaced.

    HostPool ── one Host a process (`host_handle.py`) ── python -m streamrl.tasks.host_process

A place in the pool whose process has ended or retires is filled by the next call. Calls of a process that has ended,
and that did not end it, are made again in another one, unless they had a state there, and at last alone, where none
was running and its process ends again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from streamrl.config.task import ScoringConfig
from streamrl.tasks.environment import Inference
from streamrl.tasks.failures import ScorerLost, ScorerUnready
from streamrl.tasks.host_handle import Host, HostEnded
from streamrl.tasks.host_wire import About, Call, Done, Task

TRIES = 2  # times that a call is made among others, where its process ends, before it is made alone


class HostPool:
    """The processes of one task. `close` it.

    Usage:
        pool = HostPool(Task(share={"name": "mine.py:Mine"}, timeout=30.0), "Mine", ScoringConfig())
        (await pool.about()).size
    """

    def __init__(self, task: Task, name: str, settings: ScoringConfig) -> None:
        self._task, self._name, self._settings = task, name, settings
        self._hosts: list[Host | None] = [None] * settings.processes
        self._retiring: dict[asyncio.Task[None], Host] = {}
        self._alone = asyncio.Lock()
        self._lonely = 0  # calls that are made alone, or wait for that
        self._lone: Host | None = None  # for them

    @property
    def pids(self) -> list[int]:
        """The living processes."""
        hosts = (*self._hosts, *self._retiring.values())
        return [host.pid for host in hosts if host is not None and not host.ended and host.pid is not None]

    async def about(self) -> About:
        """What the task is. Raises ValueError where it cannot be loaded, and ScorerUnready."""
        return await asyncio.shield(self._host(0).about)

    async def call(
        self,
        call: Call,
        *,
        inference: Inference | None = None,
        place: int | None = None,
        again: bool = True,
        begun: Callable[[], None] = lambda: None,
    ) -> Done:
        """Make a call in the process that has least to do, or always in the same one of a `place`.

        again: it may be made again where its process has ended, at last without others beside it.
        begun: called when its process is ready for it, each time that it is made.
        Raises as `Host.ask` does, but for HostEnded.
        """
        try:
            for _ in range(TRIES if again else 0):
                with contextlib.suppress(HostEnded):
                    return await self._host(place).ask(call, inference, begun)
            return await (self._call_alone(call, begun) if again else self._host(place).ask(call, inference, begun))
        except HostEnded as ended:
            raise (ended.why if again else ScorerLost(str(ended))) from None
        except ValueError as error:  # it could be loaded before
            raise ScorerUnready(str(error)) from None

    async def _call_alone(self, call: Call, begun: Callable[[], None]) -> Done:
        """In a process without other calls: if it ends, this call has ended it."""
        self._lonely += 1
        try:
            async with self._alone:
                if self._lone is not None and self._lone.retires:
                    lone, self._lone = self._lone, None
                    await lone.close()
                if self._lone is None or self._lone.ended:
                    self._lone = self._new()
                return await self._lone.ask(call, begun=begun)
        finally:
            self._lonely -= 1
            if self._lone is not None and not self._lonely:
                lone, self._lone = self._lone, None
                await lone.close()

    async def close(self) -> None:
        """End all processes. May be called twice."""
        given = (*self._hosts, *self._retiring.values(), self._lone)
        hosts: Sequence[Host] = [host for host in given if host is not None]
        self._hosts = [None] * len(self._hosts)
        for retiring in self._retiring:
            retiring.cancel()
        await asyncio.gather(*(host.close() for host in hosts))

    def _host(self, place: int | None) -> Host:
        """The process of a place; without one an idle process, or else a new one, or the one with least to do."""
        self._clear_places()
        if place is None:
            loads = [-0.5 if host is None else host.load - (host.load == 0) for host in self._hosts]
            place = loads.index(min(loads))
        place %= len(self._hosts)
        host = self._hosts[place]
        if host is None:
            host = self._hosts[place] = self._new()
        return host

    def _clear_places(self) -> None:
        """Of processes that have ended, and of those that retire."""
        for place, host in enumerate(self._hosts):
            if host is None or not (host.ended or host.retires):
                continue
            self._hosts[place] = None
            if not host.ended:
                retiring = asyncio.create_task(host.retire())
                self._retiring[retiring] = host
                retiring.add_done_callback(self._retiring.pop)

    def _new(self) -> Host:
        try:
            return Host(self._task, self._name, self._settings)
        except OSError as error:
            raise ScorerUnready(f"no process could be started for {self._name}: {error}") from None
