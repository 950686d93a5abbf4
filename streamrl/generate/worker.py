"""The generator worker: takes tickets, keeps that many groups going on its servers, sends them, takes in new weights.

    servers ready ─▶ greet the service ─▶ ┌ Tickets ─▶ run_group ─▶ outbox    (groups or requests in flight)
                                          │ outbox ─▶ service, until answered (generate/link.py)
                                          │ Publish ─▶ sink ─▶ Applied        (one after another at each server)
                                          │ Applied ─▶ Mismatch               (`publish.mismatch`)
                                          │ Sleep, Wake ─▶ every server       (`run.placement: shared`)
                                          │ every heartbeat: Heartbeat
                                          │ the servers' health, and their restarts (generate/fleet.py)
                                          └ a version due: evaluated on one server (generate/pinning.py)
    Stop ─▶ Bye ─▶ abort what is in flight ─▶ probes ─▶ the servers end ─▶ exit 0
    SIGTERM ─▶ no more tickets ─▶ the open ones are finished, as far as time allows ─▶ Bye ─▶ the servers end ─▶ exit 0

A worker whose last server is given up ends with the last lines of that server's log. The process that started
the worker decides whether it is started again. One whose scorer fails on every answer gives up (`task.scoring`), and
the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.concurrency import Concurrency, Updates, adapting
from streamrl.generate.fleet import Fleet
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load, Policy
from streamrl.generate.link import ServiceLink
from streamrl.generate.mismatch import MismatchMeter
from streamrl.generate.one_server import OneServer
from streamrl.generate.pinning import MakeEvaluator, Pinning
from streamrl.generate.probes import answer_probes
from streamrl.generate.request_places import PlacedPolicy, RequestPlaces, submission, want_tickets
from streamrl.generate.served import INITIAL, ServedModel
from streamrl.generate.stopping import Stopped, unless
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog
from streamrl.observe.starting import begin_part
from streamrl.progress import ProgressWatch, RunFailedError
from streamrl.publish.transport import PublishError, Sink
from streamrl.stream.messages import (
    MAX_REASON,
    Applied,
    Asleep,
    GaveUp,
    Message,
    Progress,
    Publish,
    PublishFailed,
    ServerState,
    Sleep,
    Stop,
    Tickets,
    Wake,
)
from streamrl.tasks.environment import Environment
from streamrl.tasks.hosted import close_tasks
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.scoring import ScorerBroken, Scoring
from streamrl.tasks.weighted import Weighted
from streamrl.types import Ticket

log = logging.getLogger(__name__)

# Share of run.stop_timeout for open tickets after SIGTERM and for the last probes: the end of the servers needs the
# rest.
DRAIN_SHARE = 0.5

ADAPT_PERIOD = 1.0  # seconds between two looks at how full the servers are


class Worker:
    """One worker on servers that are ready. `close` it."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        index: int,
        fleet: Fleet,
        *,
        address: str,
        events: EventLog,
        tasks: dict[str, Environment],
        rewards: Weighted,
        evaluator: MakeEvaluator | None = None,
    ) -> None:
        """`address` of the replay service. `tasks` by the names that tickets have for them; they are closed here.

        `rewards`: what the reward of their answers is made of.
        """
        self.name = f"generator-{index}"
        self._config = config
        self._run_folder = run_folder
        self._index = index
        self._fleet = fleet
        self._events = events
        self._load = Load()
        self._tokenizer = Tokenizer.of(config)
        by_sample = submission(config)
        self._places = RequestPlaces(by_sample) if by_sample else None
        self._tasks = tasks
        self._scoring = Scoring(config.task.scoring)
        self._rewards = rewards
        self._pinning = Pinning(config, run_folder, evaluator, tokenizer=self._tokenizer, events=events)
        self._link = ServiceLink(config, run_folder, self.name, address=address, servers=self._states, events=events)
        self._publishes: dict[str, asyncio.Queue[Publish]] = {name: asyncio.Queue() for name in fleet.names}
        self._orders: asyncio.Queue[Sleep | Wake] = asyncio.Queue()
        self._updates = Updates()
        self._watch = ProgressWatch(config, time.monotonic(), patience=config.stream.reply_timeout)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set or the service says Stop. Raises what `run_worker` catches."""
        begin_part(self._events, "answers the probes")
        if await unless(stop, self._probe("start")):
            return
        begin_part(self._events, "greets the replay service")
        self._pinning.begin(self._fleet.names[0], INITIAL)
        await self._link.greet()
        addresses = [served.address for served in self._fleet.servers.values()]
        version, pool = str(self._fleet.version), self._config.generate.name
        self._events.emit("ready", server=addresses[0], servers=addresses, version=version, pool=pool)
        try:
            await self._serve(stop)
        except ScorerBroken as broken:
            await self._link.send(GaveUp(reason=str(broken)[:MAX_REASON]))
            raise
        finally:
            await self._link.bye()
        await self._fleet.wake()
        if not stop.is_set():  # else the sender of the signal will not wait for long
            await self._fleet.abandon()
            await self._probe("end")

    async def close(self) -> None:
        await close_tasks(self._tasks)
        await self._pinning.close()
        self._link.close()

    def _states(self) -> tuple[ServerState, ...]:
        return self._pinning.mark(self._fleet.states)

    async def _serve(self, stop: asyncio.Event) -> None:
        """Everything that goes on at once; returns on Stop, or when it is drained."""
        try:
            async with asyncio.TaskGroup() as together:
                together.create_task(self._listen(together))
                together.create_task(self._link.deliver())
                together.create_task(self._beat())
                for name in self._publishes:
                    together.create_task(self._update(name))
                together.create_task(self._fleet.keep(self._link.greet))
                together.create_task(self._follow_orders())
                together.create_task(self._drain(stop))
                together.create_task(self._give_up())
                together.create_task(
                    self._pinning.serve(
                        lambda name: OneServer.of(self._fleet.servers[name]), self._states, self._link.send
                    )
                )
                if self._places is not None:
                    together.create_task(want_tickets(self._places, self._link.limit))
                if (concurrency := adapting(self._config)) is not None:
                    together.create_task(self._adapt(concurrency))
        except ExceptionGroup as raised:
            stopped, failures = raised.split(Stopped)
            if failures is not None:
                raise _cause(failures) from failures
            log.info("stop: %s", stopped.exceptions[0] if stopped else "")

    async def _listen(self, together: asyncio.TaskGroup) -> None:
        while True:
            message = await self._link.receive()
            if message is not None:
                self._handle(message, together)

    def _handle(self, message: Message, together: asyncio.TaskGroup) -> None:
        match message:
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    if self._link.open(ticket):
                        if self._places is not None:
                            self._places.open((ticket.group_id, ticket.attempt))
                        together.create_task(self._run_ticket(ticket))
            case Publish(server=server) if server in self._publishes:
                self._publishes[server].put_nowait(message)
            case Publish():
                together.create_task(self._refuse(message))
            case Sleep() | Wake():
                self._orders.put_nowait(message)
            case Progress():
                self._watch.step(time.monotonic())
            case Stop(reason=reason, failed=failed):
                raise RunFailedError(reason) if failed else Stopped(reason)
            case _:
                log.warning("unexpected %s from the replay service", type(message).__name__)

    async def _follow_orders(self) -> None:
        """The turns on shared devices. Only the newest order counts."""
        while True:
            order = await self._orders.get()
            while not self._orders.empty():
                order = self._orders.get_nowait()
            if isinstance(order, Wake):
                self._load.asleep = False
                await self._fleet.wake()
            else:
                await self._fleet.sleep()
                self._load.asleep = True
                await self._link.send(Asleep(number=order.number))

    async def _run_ticket(self, ticket: Ticket) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.replay.group_timeout
        key = (ticket.group_id, ticket.attempt)
        policy: Policy = self._fleet.policy(key, ticket.issued_version)
        if self._places is not None:
            policy = PlacedPolicy(policy, self._places, key)
        try:
            await self._fleet.at_least(ticket.issued_version, deadline)
            group = await run_group(
                ticket,
                self._tasks[ticket.task],
                self._inference(policy, deadline=deadline, priority=ticket.group_id),
                self._config.generate.group_size,
                longest=self._config.learner.tokens_per_micro_batch,
                temperature=self._config.generate.sampling.temperature,
                overlong=Overlong.of(self._config),
                events=self._events,
                scoring=self._scoring,
                rewards=self._rewards,
            )
        finally:
            self._fleet.leave(key)
            if self._places is not None:
                self._places.close(key)
        self._link.finish(group)

    async def _drain(self, stop: asyncio.Event) -> None:
        """After SIGTERM: finish what was begun."""
        await stop.wait()
        await self._link.drain(DRAIN_SHARE * self._config.run.stop_timeout)
        raise Stopped("drained after a signal")

    async def _give_up(self) -> None:
        """When no learner step has been reported for too long: the learner, or the service, does not come back."""
        while not self._watch.is_over(time.monotonic()):
            await asyncio.sleep(self._config.generate.heartbeat)
        raise RunFailedError(self._watch.line(f"the replay service last answered {self._link.silence:.0f} s ago"))

    def _inference(
        self, policy: Policy, *, greedy: bool = False, deadline: float | None = None, priority: int | None = None
    ) -> EngineInference:
        return EngineInference(
            policy,
            self._tokenizer,
            self._config.generate,
            self._load,
            greedy=greedy,
            deadline=deadline,
            routed_experts=self._config.learner.router_replay,
            priority=priority,
        )

    async def _beat(self) -> None:
        while True:
            load = self._load
            await self._link.beat(load.busy, load.generated, load.verified, load.accepted)
            await asyncio.sleep(self._config.generate.heartbeat)

    async def _adapt(self, concurrency: Concurrency) -> None:
        """As many groups, or requests, at once as the servers' KV caches bear."""
        places = self._places
        while True:
            await asyncio.sleep(ADAPT_PERIOD)
            if self._load.asleep:  # servers that stand still tell what they last told
                continue
            pressure = await self._fleet.pressure()
            if pressure is None:
                continue
            if pressure.num_waiting_reqs and self._updates.unsettled(time.monotonic()):
                continue  # an update has put its requests back into the queue, whatever room there is
            former, usage, waiting = concurrency.capacity, pressure.token_usage, pressure.num_waiting_reqs
            busy = len(self._link.tickets) if places is None else places.submission.running
            capacity = concurrency.record(usage, waiting, busy)
            if capacity == former:
                continue
            unit = "groups" if places is None else "requests"
            self._events.emit("concurrency", **{unit: capacity}, usage=usage, waiting=waiting)
            if places is None:
                await self._link.limit(capacity)
            else:
                places.resize(capacity)

    async def _update(self, name: str) -> None:
        """Take in the versions that the publisher sends to a server; a newer one that waits replaces an older one."""
        meter = MismatchMeter(self._config, self._events, self._link.send)
        try:
            await self._take_in(name, meter)
        finally:
            meter.close()

    async def _take_in(self, name: str, meter: MismatchMeter) -> None:
        publishes = self._publishes[name]
        served: ServedModel | None = None
        while True:
            publish = await publishes.get()
            while not publishes.empty():
                publish = publishes.get_nowait()
            present = self._fleet.servers.get(name)
            if present is None:
                await self._refuse(publish)
                continue
            if present is not served:  # it was started again: nothing of the former one is left
                served, sink = present, present.sink()
            answer = await self._apply(publish, served, sink)
            if sink.stuck:
                served.fail("waits inside a call for a source of weights that is gone")
            lost = not sink.whole and served.version != INITIAL
            if lost:
                self._fleet.lose_weights(served)
            await self._link.send(answer)
            if isinstance(answer, Applied) and answer.version == publish.version:
                meter.begin(publish, served.policy)
            if lost:
                await self._link.greet()

    async def _apply(self, publish: Publish, served: ServedModel, sink: Sink) -> Applied | PublishFailed:
        version, server = publish.version, publish.server
        tickets = len(self._link.tickets)
        try:
            self._pinning.check(served.state)
            if version < served.version or (version == served.version and sink.whole):
                return Applied(server=server, version=served.version)  # it never goes back, and loads nothing twice
            with self._events.span("publish.apply", server=server, version=str(version), tickets=tickets):
                self._updates.begin()
                try:
                    await sink.apply(version, publish.manifest)
                finally:
                    self._updates.end(time.monotonic())
            if self._fleet.servers.get(server) is not served:
                raise PublishError(f"{server} was lost")
        except PublishError as error:
            log.warning("version %s was not applied: %s", version, error)
            return PublishFailed(server=server, version=version, reason=str(error)[:4096], attempt=publish.attempt)
        self._fleet.set_version(served, version)
        return Applied(server=server, version=version, pinned=self._pinning.begin(server, version))

    async def _refuse(self, publish: Publish) -> None:
        reason = f"{self.name} has no server {publish.server} now"
        server, version, attempt = publish.server, publish.version, publish.attempt
        await self._link.send(PublishFailed(server=server, version=version, reason=reason, attempt=attempt))

    async def _probe(self, moment: str) -> None:
        """Worker 0 answers the held-out prompts; whatever keeps it from that is no failure of the run."""
        if self._index != 0 or self._config.generate.probes == 0:
            return
        inference = self._inference(self._fleet.policy(moment, INITIAL), greedy=True)
        run = self._config.run
        try:
            async with asyncio.timeout(run.start_timeout if moment == "start" else DRAIN_SHARE * run.stop_timeout):
                await answer_probes(self._config, self._run_folder, inference, self._events, moment)
        except (EngineError, TimeoutError) as error:
            if moment == "start":
                self._fleet.check()
            log.warning("probes at the %s were not answered: %s", moment, error or "not in time")
        finally:
            self._fleet.leave(moment)


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """What to report of several failures: that of the run or of the server's process, which explain the others."""
    chosen: ExceptionGroup[Any] = failures.subgroup(RunFailedError) or failures.subgroup(ServerFailed) or failures
    first: Exception = chosen.exceptions[0]
    return _cause(first) if isinstance(first, ExceptionGroup) else first
