"""The generator worker: takes tickets, keeps that many groups going on its server, sends them, takes in new weights.

    server ready ─▶ greet the service ─▶ ┌ Tickets ─▶ run_group ─▶ outbox    (groups_in_flight at once)
                                         │ outbox ─▶ service, until answered (generate/link.py)
                                         │ Publish ─▶ sink ─▶ Applied        (one after another)
                                         │ every heartbeat: Heartbeat
                                         └ the server's health
    Stop ─▶ Bye ─▶ abort what is in flight ─▶ probes ─▶ the server ends ─▶ exit 0
    SIGTERM ─▶ no more tickets ─▶ the open ones are finished, as far as time allows ─▶ Bye ─▶ the server ends ─▶ exit 0

A server that dies ends the worker with the last lines of its log; whoever started the worker decides
whether it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.engine.client import EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.link import ServiceLink
from streamrl.generate.probes import answer_probes
from streamrl.generate.served import ServedModel
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.transport import PublishError
from streamrl.stream.address import replay_address
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.messages import Applied, Message, Publish, PublishFailed, Stop, Tickets
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.registry import build_tasks
from streamrl.types import Ticket

log = logging.getLogger(__name__)

ABORT_TIMEOUT = 5.0  # seconds for the server to hear that nobody waits for its answers any more

DRAIN_SHARE = 0.5
# of run.stop_timeout, for open tickets after SIGTERM: the end of the server needs the rest.


class Stopped(Exception):
    """The run is over, or this worker is to end: not an error."""


def main(config: Config, run_folder: Path, index: int) -> int:
    """Run the role until the run is over or a signal comes. Returns the exit code.

    Raises ConfigError for a worker without an address where its pool attaches to servers.
    """
    try:
        own = config.of_worker(index)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return uvloop.run(run_worker(own, run_folder, index))


async def run_worker(config: Config, run_folder: Path, index: int) -> int:
    """Worker `index` of the run, whose own `config` this is, from its server's start to its end.

    Returns 0, or 1 when the server failed.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    events = EventLog(event_path(run_folder, "generator", index), f"generator-{index}")
    served = ServedModel(config, run_folder, index)
    try:
        if await _unless(stop, served.start()):
            return 0
        address = await asyncio.to_thread(replay_address, config, run_folder, stop.is_set)
        worker = Worker(config, run_folder, index, served, address=address, events=events)
        try:
            await worker.run(stop)
        finally:
            await worker.close()
    except (ServerFailed, EngineError, KeysUnusable, TimeoutError) as failure:
        if stop.is_set():
            return 0  # told to end while it waited
        events.emit("worker.failed", reason=str(failure))
        print(f"generator-{index}: {failure}", file=sys.stderr)
        return 1
    finally:
        await served.close()
        events.close()
    return 0


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` to its end, or until `stop` is set, which cancels it. True when it was stopped."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
        return True
    working.result()  # raises what it raised
    return False


class Worker:
    """One worker on a server that is ready. `close` it."""

    def __init__(
        self, config: Config, run_folder: Path, index: int, served: ServedModel, *, address: str, events: EventLog
    ) -> None:
        """`address` of the replay service. Raises ValueError for task arguments that do not fit."""
        self.name = f"generator-{index}"
        self._config = config
        self._index = index
        self._served = served
        self._events = events
        self._load = Load()
        self._tokenizer = Tokenizer(config.model.path)
        self._tasks = build_tasks(config.task, config.run.seed)
        self._link = ServiceLink(
            config, run_folder, self.name, address=address, servers=lambda: (served.state,), events=events
        )
        self._sink = served.sink()
        self._publishes: asyncio.Queue[Publish] = asyncio.Queue()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set or the service says Stop. Raises ServerFailed, EngineError or StreamTimeout."""
        await self._probe("start")
        await self._link.greet()
        version, pool = str(self._served.state.version), self._config.generate.name
        self._events.emit("ready", server=self._served.address, version=version, pool=pool)
        try:
            await self._serve(stop)
        finally:
            await self._link.bye()
        if not stop.is_set():  # else whoever sent the signal will not wait for long
            await self._abandon()
            await self._probe("end")

    async def close(self) -> None:
        for task in self._tasks.values():
            await task.close()
        self._link.close()

    async def _serve(self, stop: asyncio.Event) -> None:
        """Everything that goes on at once; returns on Stop, or when it is drained."""
        try:
            async with asyncio.TaskGroup() as together:
                together.create_task(self._listen(together))
                together.create_task(self._link.deliver())
                together.create_task(self._beat())
                together.create_task(self._update())
                together.create_task(self._served.watch())
                together.create_task(self._drain(stop))
        except ExceptionGroup as raised:
            stopped, failures = raised.split(Stopped)
            if failures is not None:
                raise _cause(failures) from failures
            log.info("stop: %s", stopped.exceptions[0] if stopped else "")

    async def _listen(self, together: asyncio.TaskGroup) -> None:
        while True:
            message = await self._link.receive()
            if message is not None:
                self._take(message, together)

    def _take(self, message: Message, together: asyncio.TaskGroup) -> None:
        match message:
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    if self._link.open(ticket):
                        together.create_task(self._run_ticket(ticket))
            case Publish():
                self._publishes.put_nowait(message)
            case Stop(reason=reason):
                raise Stopped(reason)
            case _:
                log.warning("unexpected %s from the replay service", type(message).__name__)

    async def _run_ticket(self, ticket: Ticket) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.replay.group_timeout
        try:
            await self._served.at_least(ticket.issued_version)
            group = await run_group(
                ticket,
                self._tasks[ticket.task],
                self._inference(deadline=deadline),
                self._config.generate.group_size,
                longest=self._config.learner.tokens_per_micro_batch,
                temperature=self._config.generate.sampling.temperature,
                overlong=Overlong.of(self._config),
                events=self._events,
            )
        except EngineError:
            self._served.check()  # its log says more than a refused connection
            raise
        self._link.finish(group)

    async def _drain(self, stop: asyncio.Event) -> None:
        """After SIGTERM: finish what was begun."""
        await stop.wait()
        await self._link.drain(DRAIN_SHARE * self._config.run.stop_timeout)
        raise Stopped("drained after a signal")

    def _inference(self, *, greedy: bool = False, deadline: float | None = None) -> EngineInference:
        generate = self._config.generate
        return EngineInference(
            self._served.policy,
            self._tokenizer,
            generate,
            self._load,
            greedy=greedy,
            deadline=deadline,
            routed_experts=self._config.learner.router_replay,
        )

    async def _beat(self) -> None:
        while True:
            await self._link.beat(self._load.busy, self._load.generated)
            await asyncio.sleep(self._config.generate.heartbeat)

    async def _update(self) -> None:
        """Take in the versions that the publisher sends; a newer one that waits replaces an older one."""
        while True:
            publish = await self._publishes.get()
            while not self._publishes.empty():
                publish = self._publishes.get_nowait()
            await self._link.say(await self._apply(publish))

    async def _apply(self, publish: Publish) -> Applied | PublishFailed:
        version, server = publish.version, publish.server
        try:
            if server != self._served.name:
                raise PublishError(f"{self.name} has no server {server}")
            if version.step < self._served.state.version.step:  # a server's version never goes back
                return Applied(server=server, version=self._served.state.version)
            tickets = len(self._link.tickets)
            with self._events.span("publish.apply", server=server, version=str(version), tickets=tickets):
                await self._sink.apply(version, publish.manifest)
        except PublishError as error:
            log.warning("version %s was not applied: %s", version, error)
            return PublishFailed(server=server, version=version, reason=str(error)[:4096], attempt=publish.attempt)
        await self._served.set_version(version)
        return Applied(server=server, version=version)

    async def _abandon(self) -> None:
        """Nobody waits any more for what the server still generates."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await self._served.client.abort()
        except (EngineError, TimeoutError) as error:
            log.info("requests in flight were not aborted: %s", error)

    async def _probe(self, moment: str) -> None:
        """Worker 0 answers the held-out prompts; at the end a server that cannot is no failure of the run."""
        if self._index != 0 or self._config.generate.probes == 0:
            return
        try:
            await answer_probes(self._config, self._inference(greedy=True), self._events, moment)
        except EngineError as error:
            self._served.check()
            log.warning("probes at the %s were not answered: %s", moment, error)


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """What to report of several failures: that of the server's process, which explains the others, or the first."""
    chosen = failures.subgroup(ServerFailed) or failures
    first = chosen.exceptions[0]
    return _cause(first) if isinstance(first, ExceptionGroup) else first
