"""Where requests wait for a place, each for one sample (`generate.submission: sample`). `submission.py` decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from streamrl.config import Config
from streamrl.config.in_flight import most_requests
from streamrl.generate.submission import Submission
from streamrl.stream.messages import TicketKey

if TYPE_CHECKING:
    from streamrl.engine.answers import Answer
    from streamrl.generate.inference import Policy


class RequestPlaces:
    """The places of one worker, in its event loop.

    Usage:
        places = RequestPlaces(submission(config))
        places.open(key)
        async with places.place(key, "a request's id"):
            answers = await policy.generate(...)
        places.close(key)
    """

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.changed = asyncio.Event()  # `submission.tickets` may be another number
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers: dict[str, int] = {}  # by the ids of requests

    def open(self, key: TicketKey) -> None:
        self.submission.open(key)
        self.changed.set()

    def close(self, key: TicketKey) -> None:
        self.submission.close(key)
        self.changed.set()

    def resize(self, places: int) -> None:
        self.submission.resize(places)
        self._start()

    @contextlib.asynccontextmanager
    async def place(self, key: TicketKey, request_id: str | None = None) -> AsyncIterator[None]:
        """A place for one request of this group, as soon as there is one, until the end of the block."""
        number = self.submission.ask(key)
        waits = self._waiting[number] = asyncio.get_running_loop().create_future()
        if request_id is not None:
            self._numbers[request_id] = number
        self._start()
        try:
            await waits
            yield
        finally:
            self._waiting.pop(number, None)
            if request_id is not None:
                del self._numbers[request_id]
            self.submission.end(number)
            self._start()

    def skip(self, request_id: str) -> None:
        """A request that waits is to go on without a place: it was ended."""
        waits = self._waiting.get(self._numbers.get(request_id, -1))
        if waits is not None and not waits.done():
            self.submission.end(self._numbers[request_id])
            waits.set_result(None)
            self.changed.set()

    def _start(self) -> None:
        for number in self.submission.start():
            if not (waits := self._waiting[number]).done():
                waits.set_result(None)
        self.changed.set()


class PlacedPolicy:
    """A `Policy` (generate/inference.py) for the requests of one group, each of which takes a place."""

    def __init__(self, policy: Policy, places: RequestPlaces, key: TicketKey) -> None:
        self._policy = policy
        self._places = places
        self._key = key

    async def generate(
        self, input_ids: Sequence[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        async with self._places.place(self._key, request_id):
            return await self._policy.generate(input_ids, sampling, n, request_id, **options)

    async def abort(self, request_id: str = "") -> None:
        await self._policy.abort(request_id)
        self._places.skip(request_id)


async def want_tickets(places: RequestPlaces, limit: Callable[[int], Awaitable[None]]) -> None:
    """As many tickets as keep every place in use, for ever. `limit` tells the service (generate/link.py)."""
    while True:
        await places.changed.wait()
        places.changed.clear()
        await limit(places.submission.tickets)


def submission(config: Config) -> Submission | None:
    """The submission of a worker, `config` as it sees it; None where its capacity is counted in groups.

    With `generate.requests_in_flight: auto` it begins with the requests of one group.
    """
    generate = config.generate
    if not generate.by_sample:
        return None
    places = generate.group_size if generate.requests_in_flight == "auto" else most_requests(config, generate)
    return Submission(places, generate.group_size)


def first_credit(config: Config) -> int:
    """Tickets that a worker holds at the most when it greets the replay service."""
    begins = submission(config)
    return begins.tickets if begins else config.generate.least_in_flight or config.generate.groups_in_flight
