"""A group's requests, wherever a worker's servers answer them: what is cut off is asked for again from its last token.

    generate ─▶ place ─▶ server ─▶ finished answers ────────────────────────▶ whole answers
                  ▲        ├▶ aborted ones (an update) ─▶ Continuation ─┐
                  │        └▶ the server is lost, late ─▶ Continuation ─┤
                  └─────────────── prompt + prefix ◀────────────────────┘

Versions only rise within an answer: it goes on at no server with older weights than those of its last token. Long
answers come in pieces (`generate.stream_every`), so that those which a lost server had drawn are known here. A server
is late after `generate.request_timeout`: that bounds a request, and no answer, which would cost the long ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from streamrl.engine.answers import Answer, Piece
from streamrl.engine.client import EngineError
from streamrl.generate.continuation import Continuation
from streamrl.generate.inference import PartlyAnswered, Policy, ServerPolicy
from streamrl.generate.prefill_scoring import PrefillScoring, can_be_scored
from streamrl.generate.stop_strings import EVERY, StopStrings
from streamrl.tasks.episodes import together
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# Parts in a row that may end without a token: a request that waits for its turn is cut by every update, but one that is
# always cut before it begins has another cause, and is given up. A server that is lost or late does not count: its
# group's deadline does.
STALLS = 8

# Seconds before a request is sent again; a server's end is noticed within a heartbeat, and then it is not chosen.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0

DOUBLINGS = 10  # of the pause, at the most: a power of a large number of tries is no float

UNAVAILABLE = (502, 503, 504)  # how a router says that the server behind it is lost


class Place(NamedTuple):
    """Where a request goes."""

    server: str
    version: PolicyVersion  # that the server had when it was chosen
    policy: Policy  # the server's own
    keeps_cache: bool = False  # over an update: what is cached is asked for by the version that computed it
    scores: ServerPolicy | None = None  # the same server for a prefill; None: nobody knows which one it is


class Servers(Protocol):
    """The servers among which a request finds its place (generate/fleet.py)."""

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place | None:
        """One that generates with `floor` or newer weights; None while there is none."""

    def changed(self) -> Awaitable[object]:
        """Done when another choice may be possible than at the time of the call."""


class GroupPolicy:
    """`Policy` (generate/inference.py) for the requests of one group."""

    def __init__(
        self,
        servers: Servers,
        group: Hashable,
        version: PolicyVersion,
        every: int,
        *,
        by_prefill: bool = False,
        cached: bool = True,
    ) -> None:
        """No token by an older step than that of `version`. `every`: tokens of a piece; 0: answers come whole.

        `by_prefill`: finished answers have the log-probs of one, where that can be; `cached`: behind a cached prompt.
        """
        self._by_prefill = by_prefill
        self._cached = cached
        self._servers = servers
        self._group = group
        self._floor = PolicyVersion(version.step)  # of any incarnation
        self._every = every
        self._running: dict[str, _Request] = {}
        self._ended: set[str] = set()  # requests that are to end where they are

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        *,
        at_least: PolicyVersion | None = None,
        ends: StopStrings | None = None,
        **options: Any,
    ) -> list[Answer]:
        """`n` answers, each whole, or an abort where it was ended by its id or could not go on.

        Raises EngineError where a server refuses the request: PartlyAnswered where it had given tokens, or where it
        contradicted itself in one of the answers. With `ends`, one answer alone.
        """
        every = self._every if ends is None else min(EVERY, self._every or EVERY)
        if 0 < every < sampling["max_new_tokens"]:
            options["every"] = every
        scoring = None
        if self._by_prefill and can_be_scored(sampling, options):
            scoring = PrefillScoring(input_ids, cached=self._cached)
        request = _Request(self._servers, self._group, request_id if n == 1 else None, options, scoring)
        floor = max(self._floor, at_least or self._floor)
        name = request_id or str(id(request))
        self._running[name] = request
        if name in self._ended:
            request.end()
        answers = [Continuation(input_ids, sampling, None if ends is None else ends.found) for _ in range(n)]
        try:
            await request.first(answers, input_ids, sampling, floor)
            await together(request.rest(answer, floor) for answer in answers if answer.goes_on)
            return without_faults(answers, await request.scored(answers))
        finally:
            del self._running[name]
            self._ended.discard(name)
            if scoring is not None:
                scoring.close()

    async def abort(self, request_id: str = "") -> None:
        """End one request for good, or all without an id; their answers come back with what they have."""
        if request_id and request_id not in self._running:
            self._ended.add(request_id)
        running = [self._running[request_id]] if request_id in self._running else []
        for request in running if request_id else list(self._running.values()):
            await request.abort()


class _Request:
    """One request and where it is."""

    def __init__(
        self,
        servers: Servers,
        group: Hashable,
        request_id: str | None,
        options: dict[str, Any],
        scoring: PrefillScoring | None = None,
    ) -> None:
        """`request_id`: by which its server can end it; None: nobody listens to it any more when it is to end.
        `scoring`: of its answers, once they have come to their ends.

        SGLang has names of its own for the answers of one request, and ends what nobody listens to.
        """
        self._servers = servers
        self._group = group
        self._id = request_id
        self._options = options
        self._scoring = scoring
        self._over = asyncio.Event()  # it is to end where it is
        self._at: Policy | None = None
        self._parts = 0
        self._avoid: str | None = None  # the server that was lost, or late, last
        # Ends the present part, whose answer has come to its stop string.
        self._ending: asyncio.Future[None] | None = None

    @property
    def _name(self) -> str | None:
        """The request id of the present part: a server that is only cut off may still know the former one."""
        return self._id if self._parts <= 1 or self._id is None else f"{self._id}-{self._parts}"

    def end(self) -> None:
        self._over.set()

    async def abort(self) -> None:
        self._over.set()
        await self._end_part()

    async def first(
        self, answers: list[Continuation], ids: Sequence[int], sampling: dict[str, Any], floor: PolicyVersion
    ) -> None:
        """Ask for all answers at once, as often as the server is lost or late before a token. Raises EngineError."""
        tries = 0
        try:
            while await self._ask(answers, ids, sampling, floor):
                if self._over.is_set() or any(map(len, answers)):
                    return
                await self._pause(tries)
                tries += 1
        except EngineError as error:
            if any(map(len, answers)):
                raise PartlyAnswered(error, await self.scored(answers)) from error
            raise

    async def rest(self, answer: Continuation, floor: PolicyVersion) -> None:
        """Ask for what is missing of one answer, until it is whole."""
        stalls = tries = 0
        while answer.goes_on and not self._over.is_set() and stalls < STALLS:
            before = len(answer)
            try:
                lost = await self._ask([answer], *answer.rest(), max(floor, answer.version or floor))
            except EngineError as error:  # refused, as its first part would have been: it stays an abort
                answer.fault = str(error)
                return
            if len(answer) > before:
                stalls = tries = 0
            elif lost:
                await self._pause(tries)
                tries += 1
            else:
                stalls += 1

    async def _ask(
        self, answers: list[Continuation], ids: Sequence[int], sampling: dict[str, Any], floor: PolicyVersion
    ) -> bool:
        """One part of each of the answers. True where its server was lost, or late."""
        place = await self._place(floor)
        if place is None:
            return False
        for answer in answers:
            answer.begin(place.version, keeps_cache=place.keeps_cache)
        options = self._options
        if place.keeps_cache:
            options = options | {"cache": str(place.version)}
        if "every" in options:
            options = options | {"pieces": self._distribute(answers, place)}
        self._at, self._parts = place.policy, self._parts + 1
        asking = asyncio.ensure_future(place.policy.generate(ids, sampling, len(answers), self._name, **options))
        try:
            if self._id is None:
                await self._unless_over(asking)
            parts = [] if asking.cancelled() else await asking
            for answer, part in zip(answers, parts, strict=False):  # none where they came in pieces
                answer.add(part)
        except EngineError as error:
            if _is_refusal(error):
                raise
            self._avoid = place.server
            return True
        finally:
            asking.cancel()
            self._at = None
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            for answer in answers:
                answer.cut()
        self._score(answers, place)
        return False

    def _score(self, answers: Iterable[Continuation], place: Place) -> None:
        """Begin to score those that have come to their ends."""
        if self._scoring is not None and place.scores is not None:
            for answer in answers:
                if answer.finished:
                    self._scoring.begin(answer, place.scores)

    async def scored(self, answers: list[Continuation]) -> list[Answer]:
        """The answers, after the prefills that have begun; at once where the request is to end."""
        if self._scoring is None:
            return [answer.answer() for answer in answers]
        await self._unless_over(self._scoring.finished())
        return [self._scoring.scored(answer) for answer in answers]

    def _distribute(self, answers: list[Continuation], place: Place) -> Callable[[Piece], None]:
        def add(piece: Piece) -> None:
            answers[piece.index].add(piece)
            self._score((answers[piece.index],), place)
            if self._ending is None and answers[piece.index].goes_on and answers[piece.index].ended:
                self._ending = asyncio.ensure_future(self._end_part())

        return add

    async def _end_part(self) -> None:
        """Nothing more is needed of the present part. Its server tells at its end which token is of which version."""
        if self._at is not None and self._name is not None:
            await end_request(self._at, self._name)

    async def _place(self, floor: PolicyVersion) -> Place | None:
        """A server, as soon as one can take it. None where the request is to end before that."""
        while not self._over.is_set():
            if place := self._servers.choose(self._group, floor, self._avoid):
                return place
            await self._unless_over(self._servers.changed())
        return None

    async def _pause(self, tries: int) -> None:
        """No pause before the first try elsewhere."""
        if tries:
            await self._unless_over(asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries, DOUBLINGS))))

    async def _unless_over(self, waiting: Awaitable[object]) -> None:
        both = (asyncio.ensure_future(waiting), asyncio.ensure_future(self._over.wait()))
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)


async def end_request(policy: Policy, request_id: str) -> None:
    """End a request where it is. One that its server cannot be told of is drawn to its own end."""
    try:
        await policy.abort(request_id)
    except EngineError as error:
        log.info("request %s was not ended: %s", request_id, error)


def without_faults(asked: Sequence[Continuation], answers: list[Answer]) -> list[Answer]:
    """The `answers` that were `asked` for. Raises PartlyAnswered where a server contradicted itself in one of them."""
    if faults := [each.fault for each in asked if each.fault]:
        raise PartlyAnswered(EngineError("", "/generate", 200, "; ".join(faults)), answers)
    return answers


def _is_refusal(error: EngineError) -> bool:
    """Whether the server is unwilling, rather than lost or late."""
    return error.status is not None and error.status not in UNAVAILABLE
