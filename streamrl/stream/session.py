"""A session with the replay service, as its peers have one: it outlives the service, and nothing is lost in it.

The learner, its publisher and every worker run on the table below. It is pure: no socket, no clock, no file.
`stream/peer.py` drives it in a thread or on asyncio, and tells it what time it is.

- *Greeting.* The opening words say who the peer is and what it still has. They come before anything else on a new
  connection, and again when the service asks (Introduce), when a word of it was lost (a gap in its numbers), or when
  it is silent although it should have answered: a service that was started again knows nobody.
- *Reconnect.* A service that was started again may listen elsewhere: RUN/replay.address says where. A connection that
  takes nothing for `stream.reply_timeout` is given up: a socket does not connect again by itself where what it
  received was spoilt on the way.
- *Resend.* A word that needs an answer stays in the outbox until it has one. It is sent again behind every greeting,
  and when no answer came for `stream.reply_timeout`. The service answers a second copy as it answered the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

from streamrl.config.file import ConfigError
from streamrl.machine import Machine
from streamrl.stream.messages import Introduce, Message, Stop
from streamrl.types import Group

log = logging.getLogger(__name__)

Word = Message | Group
K = TypeVar("K", bound=Hashable)
W = TypeVar("W")
R = TypeVar("R")


class PeerRefused(ConfigError):
    """The replay service does not let this peer take part; the text is the service's."""


class State(Enum):
    """Of a session."""

    CONNECTING = auto()  # a new connection is due
    UNKNOWN = auto()  # the service may not know this peer, or not all of it: the opening words are due
    GREETING = auto()  # they are being said
    OPEN = auto()  # they are said
    BLOCKED = auto()  # the connection takes nothing
    REFUSED = auto()  # the service does not let this peer take part


class Event(Enum):
    """What happens to a session."""

    CONNECT = auto()  # there is a new connection
    BEGIN = auto()  # the first of the opening words is said
    GREET = auto()  # the last one is said
    INTRODUCE = auto()  # the service asks who this is
    GAP = auto()  # words of the service were lost
    SILENCE = auto()  # an answer of the service may be lost, and no later word shows it
    CHANGE = auto()  # the peer has news that its opening words tell
    RECEIVE = auto()  # any word of the service
    BLOCK = auto()  # the connection took nothing for stream.reply_timeout
    RENEW = auto()  # the driver gives the connection up
    MOVE = auto()  # the service listens elsewhere
    REFUSE = auto()  # the service says Stop(refused=True)


SESSION = Machine(
    "A session with the replay service",
    {
        (State.CONNECTING, Event.CONNECT): State.UNKNOWN,
        (State.UNKNOWN, Event.BEGIN): State.GREETING,
        (State.UNKNOWN, Event.GREET): State.UNKNOWN,  # what was said was out of date when it was
        (State.UNKNOWN, Event.INTRODUCE): State.UNKNOWN,
        (State.UNKNOWN, Event.GAP): State.UNKNOWN,
        (State.UNKNOWN, Event.SILENCE): State.UNKNOWN,
        (State.UNKNOWN, Event.CHANGE): State.UNKNOWN,
        (State.UNKNOWN, Event.RECEIVE): State.UNKNOWN,
        (State.UNKNOWN, Event.BLOCK): State.BLOCKED,
        (State.UNKNOWN, Event.MOVE): State.CONNECTING,
        (State.UNKNOWN, Event.REFUSE): State.REFUSED,
        (State.GREETING, Event.GREET): State.OPEN,
        (State.GREETING, Event.BEGIN): State.GREETING,  # who said the former ones was interrupted
        (State.GREETING, Event.INTRODUCE): State.UNKNOWN,
        (State.GREETING, Event.GAP): State.UNKNOWN,
        (State.GREETING, Event.SILENCE): State.UNKNOWN,
        (State.GREETING, Event.CHANGE): State.UNKNOWN,
        (State.GREETING, Event.RECEIVE): State.GREETING,
        (State.GREETING, Event.BLOCK): State.BLOCKED,
        (State.GREETING, Event.MOVE): State.CONNECTING,
        (State.GREETING, Event.REFUSE): State.REFUSED,
        (State.OPEN, Event.INTRODUCE): State.UNKNOWN,
        (State.OPEN, Event.GAP): State.UNKNOWN,
        (State.OPEN, Event.SILENCE): State.UNKNOWN,
        (State.OPEN, Event.CHANGE): State.UNKNOWN,
        (State.OPEN, Event.RECEIVE): State.OPEN,
        (State.OPEN, Event.BLOCK): State.BLOCKED,
        (State.OPEN, Event.MOVE): State.CONNECTING,
        (State.OPEN, Event.REFUSE): State.REFUSED,
        # What the connection did not take is lost. A service that talks is greeted on it again.
        (State.BLOCKED, Event.RECEIVE): State.UNKNOWN,
        (State.BLOCKED, Event.SILENCE): State.BLOCKED,
        (State.BLOCKED, Event.CHANGE): State.BLOCKED,
        (State.BLOCKED, Event.RENEW): State.CONNECTING,
        (State.BLOCKED, Event.MOVE): State.CONNECTING,
    },
    State.CONNECTING,
)


class Outbox(Generic[K, W]):
    """Words that need an answer, by their keys, in the order in which they came.

        put ──▶ unsent ──sent──▶ waiting ──answered──▶ gone
                   ▲──────again──────┘

    >>> outbox = Outbox()
    >>> outbox.put(7, "seven")
    >>> outbox.unsent()
    (7, 'seven')
    >>> outbox.sent(7)
    >>> outbox.unsent(), outbox.keys
    (None, (7,))
    >>> outbox.answered(7)
    True
    """

    def __init__(self) -> None:
        self._words: dict[K, W] = {}
        self._unsent: dict[K, None] = {}

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, key: K) -> bool:
        return key in self._words

    @property
    def keys(self) -> tuple[K, ...]:
        return tuple(self._words)

    def put(self, key: K, word: W) -> None:
        self._words[key] = word
        self._unsent[key] = None

    def unsent(self) -> tuple[K, W] | None:
        """The first word that waits to be sent."""
        return next(((key, self._words[key]) for key in self._unsent), None)

    def sent(self, key: K) -> None:
        """The word is on its way; it stays here until it is answered."""
        self._unsent.pop(key, None)

    def again(self) -> None:
        """What was sent may be lost: everything is to be sent once more."""
        self._unsent = dict.fromkeys(self._words)

    def answered(self, key: K) -> bool:
        """The word has its answer. False where that was known."""
        self._unsent.pop(key, None)
        return self._words.pop(key, None) is not None


class Session(Generic[K]):
    """One peer's session. Times are monotonic seconds.

    Usage:
        session = Session(address, now, opening=opening, reply_timeout=30.0)
        session.connected()
        for word in session.owed(now, [Next(step=7)]):  # the opening words first, where they are due
            dealer.send(word)
        message = session.handle(dealer.receive(1.0), dealer.missed, now)
    """

    def __init__(
        self,
        address: str,
        now: float,
        *,
        opening: Callable[[], Iterable[Message]],
        reply_timeout: float,
        settle: float = 0.0,
        patience: float = 0.0,
    ) -> None:
        """`opening` words: a Hello, then everything that the service must know before the outbox.

        `settle`: seconds after a greeting in which the service's questions are about words from before it.
        `patience`: seconds of silence after which the service may be elsewhere.
        """
        self.address = address
        self.state = SESSION.initial
        self.outbox: Outbox[K, Word] = Outbox()
        self.last_seen = now
        self._opening = opening
        self._reply_timeout = reply_timeout
        self._settle = settle
        self._patience = patience
        self._greeted = float("-inf")  # when the last greeting began
        self._last_poll = now  # when the service was last looked for elsewhere
        self._missed = 0  # words of the service that were lost on this connection
        self._blocked: float | None = None  # since when, with no word of the service since
        self._progress = now  # when the outbox last got a word, or an answer
        self._refusal = ""

    # -- what the peer does

    def owed(self, now: float, words: list[Word]) -> Iterator[Word]:
        """The opening words where they are due, then `words`, each of which is dropped when the next one is asked for:
        it was sent."""
        while self.state in (State.UNKNOWN, State.GREETING):
            self._move(Event.BEGIN)
            self._greeted = now
            self.outbox.again()
            yield from self._opening()
            self._move(Event.GREET)
        while words:
            yield words[0]
            del words[0]
        if self._blocked is not None and self.last_seen > self._blocked:
            self._blocked = None

    def put(self, key: K, word: Word, now: float) -> None:
        """A word that needs an answer."""
        self.outbox.put(key, word)
        self._progress = now

    def answered(self, key: K, now: float) -> None:
        self.outbox.answered(key)
        self._progress = now

    def tick(self, now: float) -> None:
        """Send the outbox again where no answer came in time."""
        if len(self.outbox) and now - self._progress > self._reply_timeout:
            self._progress = now
            self.outbox.again()

    def changed(self) -> None:
        """The opening words have changed: they are said again."""
        self._move(Event.CHANGE)

    def insist(self, now: float) -> None:
        """The service should have answered: greet it again where it was silent for `reply_timeout`."""
        if now - max(self.last_seen, self._greeted) >= self._reply_timeout:
            self._move(Event.SILENCE)

    # -- what happens to it

    def connected(self) -> None:
        self._missed = 0
        self._move(Event.CONNECT)

    def handle(self, received: R, missed: int, now: float) -> R | None:
        """A word of the service, before which `missed` were lost on this connection. None for an Introduce.

        Raises PeerRefused where the service does not let this peer take part.
        """
        self.last_seen = now
        self._move(Event.RECEIVE)
        if isinstance(received, Stop) and received.refused:
            self._move(Event.REFUSE)
            raise PeerRefused(received.reason)
        introduce = isinstance(received, Introduce)
        # A service that was started again asks once for each word that was queued for it: one answer will do. A gap
        # that is seen too early may be of words from behind the greeting: it counts with the next word.
        if (introduce or missed > self._missed) and now - self._greeted >= self._settle:
            self._missed = missed
            self._move(Event.INTRODUCE if introduce else Event.GAP)
        return None if introduce else received

    def blocked(self, error: TimeoutError, now: float) -> float:
        """The connection took nothing. Returns for how many seconds no word came and none was taken."""
        self._move(Event.BLOCK)
        if self._blocked is None:
            self._blocked = now
            log.warning("%s: a new connection is tried", error)
        return now - self._blocked

    def is_patient(self, now: float) -> bool:
        """Whether it is too early to look for the service elsewhere."""
        return now - max(self.last_seen, self._last_poll) < self._patience

    def leaves(self, found: str | None) -> bool:
        """Whether a new connection is needed, now that RUN/replay.address says `found`."""
        return self.state is State.BLOCKED or found not in (None, self.address)

    def leave(self, found: str | None, now: float) -> None:
        """Give the connection up: the next one goes where `found` says."""
        self._last_poll = now
        if found is None or found == self.address:
            self._move(Event.RENEW)
            return
        log.info("the replay service has moved from %s to %s", self.address, found)
        self.address = found
        self._move(Event.MOVE)

    def _move(self, event: Event) -> None:
        # Of a session that was refused nothing is expected, but what its peer does meanwhile comes to its end.
        if self.state is not State.REFUSED:
            self.state = SESSION.next(self.state, event)
