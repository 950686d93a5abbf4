"""The generator worker: takes tickets, keeps that many groups going on its server, sends them, takes in new weights.

    server ready ─▶ Hello, Credit ─▶ ┌ Tickets ─▶ run_group ─▶ group      (groups_in_flight at once)
                                     │ Publish ─▶ sink ─▶ Applied         (one after another)
                                     │ every heartbeat: Heartbeat
                                     └ the server's health
    Stop ─▶ Bye ─▶ abort what is in flight ─▶ probes ─▶ the server ends ─▶ exit 0
    SIGTERM ─▶ Bye ─▶ the server ends ─▶ exit 0

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
from streamrl.engine.client import EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.group import as_placeholders, run_group
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.probes import answer_probes
from streamrl.generate.served import ServedModel
from streamrl.generate.sink import BroadcastSink
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.transport import PublishError
from streamrl.stream.address import replay_address
from streamrl.stream.messages import (
    Accepted,
    Applied,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    MalformedMessage,
    Message,
    Publish,
    PublishFailed,
    Refused,
    Stop,
    Tickets,
)
from streamrl.stream.sockets import AsyncDealer, ReceivedBatch
from streamrl.tasks.registry import build_task
from streamrl.types import Group, Ticket

log = logging.getLogger(__name__)

ABORT_TIMEOUT = 5.0  # seconds for the server to hear that nobody waits for its answers any more


class Stopped(Exception):
    """The run is over, or this worker is to end: not an error."""


def main(config: Config, run_folder: Path, index: int) -> int:
    """Run the role until the run is over or a signal comes. Returns the exit code."""
    return uvloop.run(run_worker(config, run_folder, index))


async def run_worker(config: Config, run_folder: Path, index: int) -> int:
    """Worker `index` of the run, from its server's start to its end. Returns 0, or 1 when the server failed."""
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
        worker = Worker(config, index, served, address=address, events=events)
        try:
            await worker.run(stop)
        finally:
            await worker.close()
    except (ServerFailed, EngineError, TimeoutError) as failure:
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

    def __init__(self, config: Config, index: int, served: ServedModel, *, address: str, events: EventLog) -> None:
        """`address` of the replay service. Raises ValueError for task arguments that do not fit."""
        self.name = f"generator-{index}"
        self._config = config
        self._index = index
        self._served = served
        self._events = events
        self._load = Load()
        self._tokenizer = Tokenizer(config.model.path)
        self._task = build_task(config.task, config.run.seed, split="train")
        self._dealer = AsyncDealer(address, config.stream, self.name)
        self._sink = BroadcastSink(served.client, config.publish.interruption, config.publish.timeout)
        self._publishes: asyncio.Queue[Publish] = asyncio.Queue()
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}  # by (group_id, attempt)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set or the service says Stop. Raises ServerFailed, EngineError or StreamTimeout."""
        await self._probe("start")
        await self._dealer.send(Hello(role="generator", name=self.name, servers=(self._served.state,)))
        await self._dealer.send(Credit(capacity=self._config.generate.groups_in_flight))
        self._events.emit("ready", server=self._served.address, version=str(self._served.state.version))
        try:
            interrupted = await _unless(stop, self._serve())
        finally:
            await self._dealer.send(Bye())
        if not interrupted:  # else whoever sent the signal will not wait for long
            await self._abandon()
            await self._probe("end")

    async def close(self) -> None:
        await self._task.close()
        self._dealer.close()

    async def _serve(self) -> None:
        """Everything that goes on at once; returns on Stop."""
        try:
            async with asyncio.TaskGroup() as together:
                together.create_task(self._listen(together))
                together.create_task(self._beat())
                together.create_task(self._update())
                together.create_task(self._served.watch())
        except ExceptionGroup as raised:
            stopped, failures = raised.split(Stopped)
            if failures is not None:
                raise _cause(failures) from failures
            log.info("stop: %s", stopped.exceptions[0] if stopped else "")

    async def _listen(self, together: asyncio.TaskGroup) -> None:
        while True:
            try:
                message = await self._dealer.receive(self._config.generate.heartbeat)
            except MalformedMessage as error:
                log.warning("malformed message from the replay service: %s", error.reason)
                continue
            if message is not None:
                self._take(message, together)

    def _take(self, message: Message | ReceivedBatch, together: asyncio.TaskGroup) -> None:
        match message:
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    key = (ticket.group_id, ticket.attempt)
                    self._running[key] = together.create_task(self._run_ticket(ticket))
            case Publish():
                self._publishes.put_nowait(message)
            case Accepted():
                pass  # a group is not sent twice, so that there is nothing to forget
            case Refused(group_id=group_id, attempt=attempt, reason=reason):
                self._events.emit("group.refused", group_id=group_id, attempt=attempt, reason=reason)
            case Stop(reason=reason):
                raise Stopped(reason)
            case _:
                log.warning("unexpected %s from the replay service", type(message).__name__)

    async def _run_ticket(self, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._config.replay.group_timeout):  # it is issued again by then
                await self._served.at_least(ticket.issued_version)
                size = self._config.generate.group_size
                longest = self._config.learner.tokens_per_micro_batch
                group = await run_group(
                    ticket, self._task, self._inference(), size, longest=longest, events=self._events
                )
        except TimeoutError:
            self._events.emit("group.expired", group_id=ticket.group_id, attempt=ticket.attempt)
        except EngineError:
            self._served.check()  # its log says more than a refused connection
            raise
        else:
            await self._send(group)
        finally:
            del self._running[(ticket.group_id, ticket.attempt)]

    async def _send(self, group: Group) -> None:
        """Send a group; one that is larger than a message may be goes as placeholders, so that its step can be made."""
        try:
            await self._dealer.send_group(group)
        except ValueError as error:
            self._events.emit("group.too_large", group_id=group.group_id, reason=str(error))
            log.warning("group %d is replaced by placeholders: %s", group.group_id, error)
            await self._dealer.send_group(as_placeholders(group))

    def _inference(self, *, greedy: bool = False) -> EngineInference:
        return EngineInference(self._served.client, self._tokenizer, self._config.generate, self._load, greedy=greedy)

    async def _beat(self) -> None:
        while True:
            await self._dealer.send(
                Heartbeat(tickets=tuple(self._running), busy=self._load.busy, generated=self._load.generated)
            )
            await asyncio.sleep(self._config.generate.heartbeat)

    async def _update(self) -> None:
        """Take in the versions that the publisher sends; a newer one that waits replaces an older one."""
        while True:
            publish = await self._publishes.get()
            while not self._publishes.empty():
                publish = self._publishes.get_nowait()
            await self._dealer.send(await self._apply(publish))

    async def _apply(self, publish: Publish) -> Applied | PublishFailed:
        version, server = publish.version, publish.server
        try:
            if server != self._served.name:
                raise PublishError(f"{self.name} has no server {server}")
            with self._events.span("publish.apply", server=server, version=str(version), requests=len(self._running)):
                await self._sink.apply(version, publish.manifest)
        except PublishError as error:
            log.warning("version %s was not applied: %s", version, error)
            return PublishFailed(server=server, version=version, reason=str(error)[:4096])
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
