"""The servers of one worker: started together, watched, started again, and each request placed on one of them.

    starting ─▶ up ──dies, or does not answer──▶ lost ──pause──▶ starting again ─▶ up, with its first weights
                                                   └─ generate.restarts are used up ─▶ given up

A lost server is reported to the replay service at once, by a Hello without it; its requests go on elsewhere, or wait.
One that came back, or whose weights an update has left in parts, takes requests when it has the newest version that
any server of the worker ever had, or one of a learner that was restored since. The worker fails when the last of its
servers is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path

from streamrl.config import Config
from streamrl.engine.answers import Pressure
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.gate import RequestGate
from streamrl.generate.request_placement import Placement
from streamrl.generate.requests import GroupPolicy, Place
from streamrl.generate.router import ROUTER, RouterPolicy
from streamrl.generate.served import INITIAL, ServedModel, engine_keys, keeps_cache
from streamrl.observe.events import EventLog
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a server is started again; doubled each time

ABORT_TIMEOUT = 5.0  # seconds to tell the servers that nobody waits for their answers any more

Announce = Callable[[], Awaitable[None]]


class Fleet:
    """The servers of worker `index`, whose own `config` this is. `close` it.

    Usage:
        fleet = Fleet(config, run_folder, index=0, events=events)
        await fleet.start()
        fleet.states  # (ServerState(name='server-0-0', ...), ServerState(name='server-0-1', ...))
    """

    def __init__(self, config: Config, run_folder: Path, index: int, events: EventLog) -> None:
        self._config = config
        self._run_folder = run_folder
        self._index = index
        self._events = events
        self._placement = Placement()
        self._newest = INITIAL  # that any of the servers ever had
        self._floors: dict[str, PolicyVersion] = {}  # of servers without weights: what they must have before a request
        self._given_up = 0
        self._turn = RequestGate()  # of the servers on shared devices; who comes up does so within it
        self._wake = asyncio.Event()
        self._lives: list[ServedModel] = [self._life(place) for place in range(config.generate.servers)]
        self._up: dict[str, ServedModel] = {}
        self._router = self._router_policy()
        self._keeps_cache = keeps_cache(config)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all servers, up or not."""
        return tuple(served.name for served in self._lives)

    @property
    def servers(self) -> dict[str, ServedModel]:
        """Those that are up, by their names; one that was started again is another object."""
        return dict(self._up)

    @property
    def states(self) -> tuple[ServerState, ...]:
        return tuple(served.state for served in self._up.values())

    @property
    def version(self) -> PolicyVersion:
        """The newest that any of the servers ever had."""
        return self._newest

    async def start(self) -> None:
        """Wait until all of them can generate with the initial weights. Raises ServerFailed."""
        try:
            async with asyncio.TaskGroup() as together:
                for served in self._lives:
                    together.create_task(served.start())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        self._up = {served.name: served for served in self._lives}

    def leave_nodes(self, code: int) -> None:
        """The worker ends for good, with this exit code: so do the further nodes of its servers."""
        for served in self._lives:
            served.leave_nodes(code)

    async def close(self) -> None:
        """Let go of attached servers, end our own."""
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(served.close() for served in self._lives))

    # -- requests

    def policy(self, group: Hashable, version: PolicyVersion) -> GroupPolicy:
        """For the requests of a group, whose tokens are of the step of `version` or newer; `leave` it at the end."""
        generate = self._config.generate
        return GroupPolicy(
            self,
            group,
            version,
            generate.stream_every,
            by_prefill=generate.score != "decode",
            cached=generate.score != "full_prefill",
        )

    def leave(self, group: Hashable) -> None:
        """The group has no further request."""
        self._placement.end(group)

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place | None:
        """The place of a request, on a server with `floor` or newer weights; None while there is none."""
        able = [name for name in self._up if self._suffices(name, floor)]
        if self._router is not None:  # it may choose any of them
            whole = able and len(able) == len(self._up)
            if not whole:
                return None
            oldest = min(self._up[name].state.version for name in able)
            return Place(ROUTER, oldest, self._router, self._keeps_cache)
        if not able:
            return None
        served = self._up[self._placement.choose(group, able, avoid)]
        return Place(served.name, served.state.version, served.policy, self._keeps_cache, served.policy)

    def _suffices(self, name: str, floor: PolicyVersion) -> bool:
        return self._up[name].state.version >= max(floor, self._floors.get(name, floor))

    def changed(self) -> Awaitable[object]:
        """Done when another choice may be possible than at the time of the call."""
        return self._wake.wait()

    async def at_least(self, version: PolicyVersion, deadline: float) -> None:
        """Wait until a request of the step of `version` finds a place, until `deadline` on the loop's clock at most."""
        while not self._finds_a_place(PolicyVersion(version.step)):
            try:
                async with asyncio.timeout_at(deadline):
                    await self.changed()
            except TimeoutError:
                return

    def _finds_a_place(self, floor: PolicyVersion) -> bool:
        able = [self._suffices(name, floor) for name in self._up]
        return bool(able) and (any(able) if self._router is None else all(able))

    async def abandon(self) -> None:
        """Nobody waits any more for what the servers still generate."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await asyncio.gather(*(served.client.abort() for served in self._up.values()))
        except (EngineError, TimeoutError) as error:
            log.info("requests in flight were not aborted: %s", error)

    # -- turns on shared devices

    async def sleep(self) -> None:
        """The learner has the devices from the end of this call on: a start under way comes to its end first."""
        await self._turn.close(timeout=None)
        await asyncio.gather(*(served.sleep() for served in self._up.values()))

    async def wake(self) -> None:
        """The servers have them again."""
        if not self._turn.is_open:
            await asyncio.gather(*(served.wake() for served in self._up.values()))
        self._turn.open()

    # -- versions, health

    def set_version(self, served: ServedModel, version: PolicyVersion) -> None:
        """The sink has brought a server to `version`.

        One of a later incarnation ends the wait for a newer one: a restored learner comes to that step by what the
        server generates now, or not at all.
        """
        served.version = version
        self._newest = max(self._newest, version)
        floor = self._floors.get(served.name)
        if floor is not None and (version >= floor or version.incarnation > floor.incarnation):
            del self._floors[served.name]
        self._notify()

    def lose_weights(self, served: ServedModel) -> None:
        """A failed update has left a server with parts of two versions: it has none, as after its start."""
        self._floors[served.name] = self._newest
        served.version = INITIAL
        self._notify()

    def check(self) -> None:
        """Raise ServerFailed when the process of a server has ended: its log says more than a refused connection."""
        for served in self._up.values():
            served.check()

    async def pressure(self) -> Pressure | None:
        """How full the fullest of them is; None where none tells it."""
        asked = [served.client.pressure() for served in self._up.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        pressures = [found for found in answers if isinstance(found, Pressure)]
        return max(pressures, key=lambda found: (found.token_usage, found.num_waiting_reqs), default=None)

    async def keep(self, announce: Announce) -> None:
        """Watch every server, and start again what is lost; `announce` tells the service which are up.

        Never returns. Raises ServerFailed when the last server is given up.
        """
        async with asyncio.TaskGroup() as together:
            for place in range(len(self._lives)):
                together.create_task(self._keep(place, announce))

    async def _keep(self, place: int, announce: Announce) -> None:
        restarts, pause = 0, FIRST_PAUSE
        while True:
            cause = await self._end_of(place)
            await self._lose(place, cause, announce)
            while self._lives[place].name not in self._up:
                if restarts >= self._config.generate.restarts:
                    self._give_up(cause)
                    return
                restarts += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                cause = await self._start_again(place, restarts, announce) or cause

    async def _end_of(self, place: int) -> ServerFailed:
        """Wait for it."""
        try:
            await self._lives[place].watch()
        except ServerFailed as failure:
            return failure
        raise AssertionError("a watch has no other end")

    async def _lose(self, place: int, failure: ServerFailed, announce: Announce) -> None:
        served = self._lives[place]
        del self._up[served.name]
        self._notify()
        self._events.emit("server.lost", server=served.name, reason=str(failure).partition("\n")[0])
        log.warning("%s is lost: %s", served.name, failure)
        await announce()
        await served.close()  # its processes, where it hangs

    async def _start_again(self, place: int, restarts: int, announce: Announce) -> ServerFailed | None:
        """A new life for a lost server, begun in the servers' turn; why not, where it did not come up."""
        async with self._turn.pass_():
            try:
                served = self._lives[place] = self._life(place)
            except (ServerFailed, OSError) as error:  # no memory or no descriptor is left: another time there may be
                log.warning("server %d was not started: %s", place, error)
                return error if isinstance(error, ServerFailed) else ServerFailed(str(error))
            self._floors[served.name] = self._newest
            try:
                await served.start(patient=True)
            except ServerFailed as failure:
                log.warning("%s did not come back: %s", served.name, failure)
                await served.close()
                return failure
            self._up[served.name] = served
        self._events.emit("server.restarted", server=served.name, address=served.address, restarts=restarts)
        self._notify()
        await announce()
        return None

    def _give_up(self, cause: ServerFailed) -> None:
        self._given_up += 1
        if self._given_up == len(self._lives):
            raise cause

    def _notify(self) -> None:
        """Wake all tasks that wait for a change now."""
        self._wake.set()
        self._wake = asyncio.Event()

    def _life(self, place: int) -> ServedModel:
        return ServedModel(self._config, self._run_folder, self._index, place)

    def _router_policy(self) -> RouterPolicy | None:
        generate = self._config.generate
        if generate.router is None:
            return None
        keys = engine_keys(self._config, self._run_folder)
        client = EngineClient(generate.router, self._config.request_timeout, keys)
        return RouterPolicy(client, lambda: [served.client for served in self._up.values()])
