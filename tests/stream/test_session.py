"""A session under everything that can happen to it: each word that needs an answer gets one, and none is forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.machine import IllegalTransition
from streamrl.stream.messages import Accepted, Heartbeat, Hello, Introduce, Message, Next, Stop, decode, encode
from streamrl.stream.session import SESSION, Event, PeerRefused, Session, State, Word
from streamrl.stream.sockets import StreamTimeout, _Numbers
from streamrl.types import PolicyVersion

REPLY_TIMEOUT = 5.0
ADDRESSES = ("here", "there")


class Line:
    """A connection: numbered words on their way to and from the service at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.numbers = _Numbers()
        self.missed = 0
        self.is_full = False

    def receive(self) -> Message:
        header, missed = self.numbers.strip(memoryview(self.down.popleft()))
        self.missed += missed
        return decode(header)


class Service:
    """One life of the replay service, of which the journal, `accepted`, survives."""

    def __init__(self, accepted: list[int]) -> None:
        self.accepted = accepted
        self.numbers: dict[int, _Numbers] = {}
        self.revisions: dict[int, int] = {}  # of the peer's news, for each line that is known
        self.asked: set[int] = set()  # lines on which words were lost, and no Hello came since

    def handle(self, line: Line) -> None:
        numbers = self.numbers.setdefault(id(line), _Numbers())
        header, missed = numbers.strip(memoryview(line.up.popleft()))
        word = decode(header)
        if missed:
            self.asked.add(id(line))
        answers: list[Message] = []
        if isinstance(word, Hello):
            assert word.version is not None
            self.revisions[id(line)] = word.version.step
            self.asked.discard(id(line))
        elif id(line) in self.asked or id(line) not in self.revisions:
            answers = [Introduce()]
        if isinstance(word, Next) and id(line) in self.revisions:
            if word.step not in self.accepted:
                self.accepted.append(word.step)
            answers.append(Accepted(group_id=word.step, attempt=0))
        line.down.extend(numbers.stamp(encode(answer)) for answer in answers)


class Circle(RuleBasedStateMachine):
    """A peer that sends one word after another, as on asyncio: anything may happen between two of them."""

    @initialize(settle=st.sampled_from([0.0, 1.0]), patience=st.sampled_from([0.0, REPLY_TIMEOUT]))
    def begin(self, settle: float, patience: float) -> None:
        self.now = 0.0
        self.told = ADDRESSES[0]
        self.revision = self.put = 0
        self.accepted: list[int] = []
        self.answered: set[int] = set()
        self.service = Service(self.accepted)
        self.session: Session[int] = Session(
            self.told, self.now, opening=self.opening, reply_timeout=REPLY_TIMEOUT, settle=settle, patience=patience
        )
        self.sending: Iterator[Word] | None = None
        self.asking: int | None = None  # what `sending` sends of the outbox
        self.connect()

    def opening(self) -> Iterator[Message]:
        yield Hello(run="r", role="learner", name="peer", version=PolicyVersion(self.revision))
        yield Heartbeat()  # as long as the second word is due, the first one may be out of date

    def connect(self) -> None:
        self.line = Line(self.session.address)
        self.session.connected()

    @rule()
    def puts_a_word(self) -> None:
        self.session.put(self.put, Next(step=self.put), self.now)
        self.put += 1

    @rule()
    def has_news(self) -> None:
        self.revision += 1
        self.session.changed()

    @precondition(lambda self: self.sending is None and self.session.state is not State.BLOCKED)
    @rule()
    def begins_to_send(self) -> None:
        self.session.tick(self.now)
        unsent = self.session.outbox.unsent()
        self.asking = unsent[0] if unsent else None
        self.sending = self.session.owed(self.now, [unsent[1] if unsent else Heartbeat()])

    @precondition(lambda self: self.sending is not None)
    @rule()
    def sends_a_word(self) -> None:
        assert self.sending is not None
        word = next(self.sending, None)
        if word is None:  # all is sent
            self.sending = None
            if self.asking is not None:
                self.session.outbox.sent(self.asking)
        elif self.line.is_full:
            self.session.blocked(StreamTimeout("full"), self.now)
            self.sending = None
        else:
            assert isinstance(word, Message)
            self.line.up.append(self.line.numbers.stamp(encode(word)))

    @rule(lost=st.sampled_from(["nothing", "words", "answers"]))
    def talks_for_a_moment(self, lost: str) -> None:
        """A word, its answer, and nothing of either on the way any more."""
        if self.sending is None and self.session.state is not State.BLOCKED:
            self.begins_to_send()
        while self.sending is not None:
            self.sends_a_word()
        if lost == "words":
            self.line.up.clear()
        while self.line.up and self.line.address == self.told:
            self.service_handles_a_word()
        if lost == "answers":
            self.line.down.clear()
        while self.line.down:
            self.peer_handles_a_word()
        self.expect_nothing()

    @precondition(lambda self: self.sending is not None)
    @rule()
    def is_interrupted(self) -> None:
        self.sending = None

    @precondition(lambda self: self.line.up and self.line.address == self.told)
    @rule()
    def service_handles_a_word(self) -> None:
        self.service.handle(self.line)

    @precondition(lambda self: self.line.down)
    @rule()
    def peer_handles_a_word(self) -> None:
        message = self.session.handle(self.line.receive(), self.line.missed, self.now)
        if isinstance(message, Accepted):
            self.session.answered(message.group_id, self.now)
            self.answered.add(message.group_id)

    @precondition(lambda self: not self.line.down and self.sending is None)
    @rule()
    def expect_nothing(self) -> None:
        if not self.session.is_patient(self.now) and self.session.leaves(self.told):
            self.session.leave(self.told, self.now)
            self.connect()

    @rule()
    def insists(self) -> None:
        self.session.insist(self.now)

    @rule(up=st.integers(0, 3), down=st.integers(0, 3))
    def connection_breaks(self, up: int, down: int) -> None:
        """What was sent last was not through yet."""
        for _ in range(min(up, len(self.line.up))):
            self.line.up.pop()
        for _ in range(min(down, len(self.line.down))):
            self.line.down.pop()

    @rule(is_full=st.booleans())
    def connection_jams_or_not(self, is_full: bool) -> None:
        self.line.is_full = is_full

    @rule()
    def service_is_started_again(self) -> None:
        self.service = Service(self.accepted)

    @rule(address=st.sampled_from(ADDRESSES))
    def service_moves(self, address: str) -> None:
        self.told, self.service = address, Service(self.accepted)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_that_has_no_answer_is_forgotten(self) -> None:
        assert {*self.session.outbox.keys} == {*range(self.put)} - self.answered

    @invariant()
    def what_was_answered_was_accepted_once(self) -> None:
        assert self.answered <= {*self.accepted}
        assert len(self.accepted) == len({*self.accepted})

    def teardown(self) -> None:
        """What was said last, or its answer, is lost; then nothing fails any more."""
        if not hasattr(self, "session"):
            return
        self.line.is_full = False
        self.puts_a_word()
        self.talks_for_a_moment("answers" if self.put % 2 else "words")
        for _ in range(20 + 2 * self.put):
            self.time_passes(1.0)
            self.talks_for_a_moment("nothing")
        assert self.session.state is State.OPEN
        assert self.answered == {*self.accepted} == {*range(self.put)}
        assert not self.line.up
        assert self.service.revisions[id(self.line)] == self.revision


TestCircle = Circle.TestCase
TestCircle.settings = settings(max_examples=200, stateful_step_count=25)


def session(**settings: float) -> Session[int]:
    made: Session[int] = Session("here", 0.0, opening=lambda: [Heartbeat()], reply_timeout=REPLY_TIMEOUT, **settings)
    made.connected()
    return made


def test_the_opening_words_come_before_everything_else_and_the_outbox_is_sent_again_behind_them() -> None:
    one = session()
    one.put(3, Next(step=3), 0.0)
    one.outbox.sent(3)
    assert [*one.owed(0.0, [Next(step=9)])] == [Heartbeat(), Next(step=9)]
    assert one.outbox.unsent() == (3, Next(step=3))
    assert [*one.owed(0.0, [Next(step=9)])] == [Next(step=9)]


def test_news_that_come_while_the_opening_words_are_said_make_them_be_said_again() -> None:
    one = session()
    sending = one.owed(0.0, [])
    next(sending)
    one.changed()
    assert one.state is State.UNKNOWN
    assert [*sending] == [Heartbeat()]
    assert one.state is State.OPEN


def test_a_question_right_after_a_greeting_is_about_words_from_before_it() -> None:
    one = session(settle=1.0)
    assert [*one.owed(0.0, [])] == [Heartbeat()]
    assert one.handle(Introduce(), 0, 0.5) is None
    assert one.state is State.OPEN
    assert one.handle(Introduce(), 0, 1.0) is None
    assert one.state is State.UNKNOWN


def test_a_gap_right_after_a_greeting_is_not_forgotten() -> None:
    one = session(settle=1.0)
    assert [*one.owed(0.0, [])] == [Heartbeat()]
    one.handle(Heartbeat(), 1, 0.5)
    assert one.state is State.OPEN
    one.handle(Heartbeat(), 1, 1.0)
    assert one.state is State.UNKNOWN
    assert [*one.owed(1.0, [])] == [Heartbeat()]
    one.handle(Heartbeat(), 1, 3.0)
    assert one.state is State.OPEN


def test_a_session_that_is_refused_stays_so_whatever_its_peer_still_does() -> None:
    one = session()
    sending = one.owed(0.0, [])
    next(sending)
    with pytest.raises(PeerRefused, match="another run"):
        one.handle(Stop(reason="another run", refused=True), 0, 0.0)
    assert [*sending] == []
    one.changed()
    assert one.state is State.REFUSED


def test_what_the_table_does_not_have_raises() -> None:
    with pytest.raises(IllegalTransition, match="GREET is not possible in BLOCKED"):
        SESSION.next(State.BLOCKED, Event.GREET)
