"""Pinning: one server of the worker keeps its version while that is evaluated, and is left out of publishing.

    version due ─▶ pinned: said in Hello or Applied ─▶ evaluated ─▶ Evaluated ─▶ Applied: no longer pinned
                                                          └ it failed: the event says why ─▶┘

Evaluation requests are no tickets: they count neither in the bound nor in the worker's credit. Beside them the server
goes on with the tickets that its version suffices for. What evaluates is given from above (`cli.py`), because no role
imports another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.one_server import OneServer
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog
from streamrl.publish.transport import PublishError
from streamrl.stream.messages import Applied, Evaluated, Message, ServerState
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)


class Evaluator(Protocol):
    """What asks the held-out prompts and judges their answers."""

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether `version` is to be evaluated."""
        ...

    async def run(self, version: PolicyVersion, handles: partial[EngineInference]) -> dict[str, float]:
        """Evaluate through handles that `handles(greedy=..., deadline=...)` makes. Returns the metrics `eval/...`.

        Ends by itself in `evaluate.longest` seconds. Raises EngineError when the server cannot be reached.
        """
        ...

    async def close(self) -> None: ...


MakeEvaluator = Callable[[Config, Path], Evaluator]


class Pinning:
    """The evaluations of one worker, one at a time. `close` it.

    Usage:
        pinning = Pinning(config, run_folder, make, tokenizer=tokenizer, events=events)
        pinned = pinning.begin("server-0", version)  # True: `serve`, which runs beside the rest, evaluates it
        await link.send(Applied(server="server-0", version=version, pinned=pinned))
    """

    def __init__(
        self, config: Config, run_folder: Path, make: MakeEvaluator | None, *, tokenizer: Tokenizer, events: EventLog
    ) -> None:
        """`make` None, or no `evaluate.every`: nothing is ever due. Raises ValueError for tasks that do not fit."""
        sampling = config.evaluate.sampling(config.generate.sampling)
        self._generate = config.generate.model_copy(update={"sampling": sampling})
        self._heartbeat = config.generate.heartbeat
        self._evaluator = make(config, run_folder) if make is not None and config.evaluate.every else None
        self._tokenizer = tokenizer
        self._events = events
        self._pinned: tuple[str, PolicyVersion] | None = None
        self._begun = asyncio.Event()

    def begin(self, server: str, version: PolicyVersion) -> bool:
        """A server has `version` now: whether it keeps it, because its evaluation begins."""
        if self._evaluator is None or self._pinned is not None or not self._evaluator.is_due(version):
            return False
        self._pinned = server, version
        self._begun.set()
        return True

    def has(self, server: ServerState) -> bool:
        """Is this server pinned? One that was started again, with other weights, is not."""
        return self._pinned == (server.name, server.version)

    def check(self, server: ServerState) -> None:
        """Raise PublishError where `server` takes no weights now: they were sent before it was known to be pinned."""
        if self.has(server):
            raise PublishError(f"{server.name} is being evaluated")

    def mark(self, states: Iterable[ServerState]) -> tuple[ServerState, ...]:
        """The states of the worker's servers as they are reported to the service."""
        return tuple(replace(state, pinned=self.has(state)) for state in states)

    async def serve(
        self,
        policy: Callable[[str], OneServer],
        states: Callable[[], Iterable[ServerState]],
        send: Callable[[Message], Awaitable[bool]],
    ) -> None:
        """Evaluate what is begun, for ever.

        policy: a server by its name. states: of all servers. send: one message to the replay service,
        False when it takes none now.
        """
        while True:
            await self._begun.wait()
            assert self._pinned is not None  # set before the event
            server, version = self._pinned
            metrics = await self._evaluate(server, version, policy)
            while metrics and not await send(Evaluated(version=version, metrics=metrics)):
                await asyncio.sleep(self._heartbeat)
            self._pinned = None
            self._begun.clear()
            if state := next((state for state in states() if state.name == server), None):
                await send(Applied(server=server, version=state.version))  # lost, the next Hello tells the same

    async def _evaluate(
        self, server: str, version: PolicyVersion, policy: Callable[[str], OneServer]
    ) -> dict[str, float]:
        """The metrics; none where the evaluation failed."""
        assert self._evaluator is not None  # else nothing is begun
        with self._events.span("evaluate", server=server, version=str(version)) as outcome:
            try:
                handles = partial(
                    EngineInference, policy(server), self._tokenizer, self._generate, Load(), trained=False
                )
                metrics = await self._evaluator.run(version, handles)
            except EngineError as error:
                log.warning("version %s was not evaluated: %s", version, error)
                outcome["failed"] = str(error)
                return {}
            except Exception as error:  # the policy for foreign tasks: one costs its evaluation, not the worker
                log.exception("version %s was not evaluated", version)
                outcome["failed"] = f"{type(error).__name__}: {error}"
                return {}
            outcome["metrics"] = metrics
        return metrics

    async def close(self) -> None:
        if self._evaluator is not None:
            await self._evaluator.close()
