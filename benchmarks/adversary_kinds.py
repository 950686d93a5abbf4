"""Every kind of thing that `benchmarks/adversary.py` sends to a replay service, and what has to come of it.

A kind is a name, what is expected, as a regular expression over what was seen, and an act. What is seen is the
service's answer, or else the event that it has written of this peer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.adversary_peers import GREETING, PATIENCE, READY, WAIT, Circle, Member, Stranger, changed
from benchmarks.fault_roles import TOKENS, make_group
from streamrl.stream.codec import encode_group
from streamrl.stream.door import HANDSHAKE_SECONDS
from streamrl.stream.keys import ClientKeys
from streamrl.stream.messages import (
    PROTOCOL,
    Accepted,
    Applied,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Message,
    Next,
    Publish,
    PublishFailed,
    Refused,
    Stop,
    Tickets,
    encode,
)
from streamrl.types import Ledger, PolicyVersion, Ticket

V0 = PolicyVersion(0)
NOTED = ("replay.malformed", "replay.refused", "group.refused")  # events that tell why something was turned away
SILENCE = "nothing"
NOTHING = f"^{SILENCE}$"  # expected


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that is sent, by whom, and what has to be seen."""

    name: str
    who: str  # a stranger; a member, who has the keys; a worker, who has said Hello; an answer to a ticket
    expected: str
    act: Callable[[Circle, str], str]  # (the run, the service's address): what was seen


def every_kind() -> Iterator[Kind]:
    """In the order in which they are sent."""
    yield from _strangers()
    yield from _members()
    yield from _workers()
    yield from _answers()


def matches(kind: Kind, seen: str) -> bool:
    return re.search(kind.expected, seen) is not None


# -- what is seen


def _seen(circle: Circle, member: Member, patience: float = WAIT) -> str:
    """The service's answer to a member, or its events about it, or that in `patience` seconds there is nothing."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if (message := member.receive(0.05)) is not None:
            if isinstance(message, Tickets | Publish):
                continue
            return _described(message)
        for event in circle.events_of():
            about = event.get("peer") == member.identity or member.name in (event.get("name"), event.get("worker"))
            if event["event"] in NOTED and about:
                # The service notes first and answers then.
                late = None if event["event"] == "replay.malformed" else member.receive(patience)
                return f"{event['event']}: {event['reason']}" if late is None else _described(late)
    return SILENCE


def _described(message: Message) -> str:
    match message:
        case Refused(reason=reason) | Stop(reason=reason):
            return f"{type(message).__name__}: {reason}"
        case _:
            return type(message).__name__


# -- without a key: nothing is answered, and the connection ends


def _strangers() -> Iterator[Kind]:
    greeting = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    plain = GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32)
    null = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
    frame = b"\x06" + (1 << 40).to_bytes(8, "big")
    sayings = {
        "nothing at all": b"",
        "an HTTP request": b"GET / HTTP/1.1\r\nHost: run\r\n\r\n",
        "a TLS hello": bytes.fromhex("1603010200010001fc0303") + bytes(64),
        "random bytes": np.random.default_rng(0).bytes(500),
        "half a greeting": greeting[:30],
        "a greeting, and no more": greeting,
        "ZMTP 1.0": b"\x01\x00\x01\x00",
        "the mechanism NULL, and a group": null + READY + b"\x00\x05hello",
        "the mechanism PLAIN": plain + b"\x04\x0b\x05HELLO\x01a\x01b",
        "a handshake of 2**40 bytes": greeting + frame + bytes(1000),
        "a handshake of 200 kB": greeting + b"\x06" + (200_000).to_bytes(8, "big") + bytes(100_000),
        "a HELLO without content": greeting + b"\x04\x06\x05HELLO",
        "an INITIATE first": greeting + b"\x06" + (257).to_bytes(8, "big") + b"\x08INITIATE" + bytes(248),
        "a message before the handshake": greeting + b"\x00\x0512345",
        "the longest command name": greeting + b"\x04\xff" + b"\xff" * 255,
    }
    for name, saying in sayings.items():
        yield Kind(name, "stranger", "^hung up on$", _stranger(saying))
    yield Kind("another client's key", "stranger", NOTHING, _wrong_key(client=True))
    yield Kind("another service's key", "stranger", NOTHING, _wrong_key(client=False))
    yield Kind("a DEALER without CURVE", "stranger", NOTHING, _wrong_key(client=None))


def _stranger(saying: bytes) -> Callable[[Circle, str], str]:
    def act(_: Circle, address: str) -> str:
        with Stranger(address) as stranger:
            stranger.pour(saying, len(saying))
            return "hung up on" if stranger.is_hung_up_on(2 * HANDSHAKE_SECONDS) else "still connected"

    return act


def _wrong_key(client: bool | None) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        keys = circle.keys
        public, secret = zmq.curve_keypair()
        if client is None:
            given = None
        else:
            given = (
                ClientKeys(secret, public, keys.service_public)
                if client
                else ClientKeys(keys.secret, keys.public, public)
            )
        with Member(address, given) as member:
            member.join(circle.run, V0)
            message = member.receive(PATIENCE)
            return SILENCE if message is None else _described(message)

    return act


# -- with the run's keys, before a Hello


def _members() -> Iterator[Kind]:
    hello = encode(Hello(run="?", role="generator", name="evil"))
    deep = b"\x91" * 100_000
    malformed = {
        "an empty header": b"",
        "random bytes": np.random.default_rng(1).bytes(100),
        "a number for a map": b"\x07",
        "nesting without end": deep,
        "an array of 2**32 that is not there": b"\xdd\xff\xff\xff\xff",
        "a map of 2**32 that is not there": b"\xdf\xff\xff\xff\xff",
        "a text that is no UTF-8": b"\x82\xa1v\x05\xa4kind\xa2\xff\xfe",
        "a number for a kind": changed(hello, kind=7),
        "an unknown kind": changed(hello, kind="bomb"),
        "another protocol version": changed(hello, v=PROTOCOL - 1),
        "no protocol version": changed(hello, v=...),
        "bytes behind the message": hello + b"\x00",
        "half a message": hello[: len(hello) // 2],
        "a field that nobody knows": changed(hello, admin=True),
        "a role that nobody has": changed(hello, role="king"),
        "an empty name": changed(hello, name=""),
        "a name of 300 characters": changed(hello, name="n" * 300),
        "a learner without a version": changed(hello, role="learner"),
        "a negative step": changed(hello, role="learner", version=[-1, 0]),
        "a step of 2**40": changed(hello, role="learner", version=[1 << 40, 0]),
        "servers that are no list": changed(hello, servers={"a": 1}),
        "a negative ticket": changed(hello, tickets=[[-1, 0]]),
        "limits of nothing": changed(hello, limits={"vocabulary": 0, "tokens": 0}),
    }
    for name, header in malformed.items():
        yield Kind(name, "member", r"^(Stop|replay\.malformed): (refused: )?", _member(header))
    yield Kind("a frame shorter than its number", "member", "malformed|Stop", _raw(b"1234567"))
    yield Kind("three frames", "member", "3 frames in one message; allowed: 2", _raw(bytes(8) + hello, b"", b""))
    yield Kind("5,000 frames", "member", "5000 frames in one message; allowed: 2", _raw(*[b""] * 5000))
    yield Kind("a message that is too large", "member", "stream.max_message allows", _too_large)
    yield Kind("a frame that is too large", "member", NOTHING, _too_large_frame)
    yield Kind("a word before the Hello", "member", "^Introduce$", _member(encode(Credit(capacity=3))))
    yield Kind("another run's Hello", "member", "is of run somebody-else", _hello(run="somebody-else"))
    huge = Ledger(below=1 << 50, above=(), pending={}, cursors={})
    yield Kind("a ledger with a huge id", "member", "its ledger knows", _hello(role="learner", ledger=huge))
    alien = Ledger(below=0, above=(), pending={0: ("nobody", 0)}, cursors={})
    yield Kind("a ledger of another task", "member", "its ledger names the task", _hello(role="learner", ledger=alien))
    other = Ledger(below=0, above=(), pending={}, cursors={}, run="somebody-else")
    yield Kind("a ledger of another run", "member", "its ledger is of run", _hello(role="learner", ledger=other))


def _member(header: bytes) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            member.send(header)
            return _seen(circle, member)

    return act


def _raw(*frames: bytes, patience: float = WAIT) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            member.raw(*frames)
            return _seen(circle, member, patience)

    return act


def _too_large(circle: Circle, address: str) -> str:
    half = bytes(circle.config.stream.max_message // 2 + 1)
    return _raw(half, half)(circle, address)


def _too_large_frame(circle: Circle, address: str) -> str:
    return _raw(bytes(circle.config.stream.max_message + 4096), patience=PATIENCE)(circle, address)


def _hello(run: str | None = None, **fields: Any) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            given: dict[str, Any] = {"role": "generator", "version": V0} | fields
            member.send(Hello(run=run or circle.run, name=member.name, **given))
            return _seen(circle, member)

    return act


# -- a worker that the service knows


def _workers() -> Iterator[Kind]:
    far = PolicyVersion(1_000_000)
    words: dict[str, tuple[Message | bytes, str]] = {
        "a learner's word": (Next(step=0), "Next from a generator"),
        "the service's own word": (_WELCOME, "malformed"),
        "weights of a server that it has not": (Applied(server="nobody", version=V0), "nobody is not one of worker"),
        "a failure of a server that it has not": (
            PublishFailed(server="nobody", version=V0, reason="r"),
            "nobody is not one of worker",
        ),
        "a negative credit": (changed(encode(Credit(capacity=0)), capacity=-1), "malformed"),
        "a credit of 2**60": (changed(encode(Credit(capacity=0)), capacity=1 << 60), "malformed"),
        "a credit that is a text": (changed(encode(Credit(capacity=0)), capacity="9"), "malformed"),
        "a heartbeat of negative seconds": (changed(encode(Heartbeat()), busy=-1.0), "malformed"),
        "a heartbeat of NaN seconds": (changed(encode(Heartbeat()), busy=float("nan")), "malformed"),
        "a heartbeat for tickets of others": (
            Heartbeat(tickets=tuple((number, 0) for number in range(100_000))),
            NOTHING,
        ),
        "a Bye, and then a word": (Bye(), NOTHING),
    }
    for name, (word, expected) in words.items():
        yield Kind(name, "worker", expected, _worker(word, PATIENCE if expected == NOTHING else WAIT))
    yield Kind("weights that were never announced", "worker", "never (announced|published)", _unannounced(far))


_WELCOME = b"\x82\xa1v\x05\xa4kind\xa7welcome"


def _worker(word: Message | bytes, patience: float) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            member.join(circle.run, V0)
            member.send(word)
            seen = _seen(circle, member, patience)
            member.send(Bye())
            return seen

    return act


def _unannounced(version: PolicyVersion) -> Callable[[Circle, str], str]:
    def act(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            member.join(circle.run, V0)
            member.send(Applied(server=f"{member.name}-server", version=version))
            seen = _seen(circle, member)
            member.send(Bye())
            return seen

    return act


# -- an answer to a ticket

Frames = tuple[bytes, bytes]
Spoil = Callable[[Ticket, bytes, bytes], Frames]


def _answers() -> Iterator[Kind]:
    def fields(**given: Any) -> Spoil:
        return lambda ticket, header, arena: (changed(header, **given), arena)

    def shifted(name: str, by: int) -> Spoil:
        return lambda ticket, header, arena: (changed(header, **{name: getattr(ticket, name) + by}), arena)

    refused = r"^Refused: "
    spoilt: dict[str, tuple[Spoil, str]] = {
        "an arena of one byte less": (lambda ticket, header, arena: (header, arena[:-1]), refused + "group: arena of"),
        "an arena of one byte more": (
            lambda ticket, header, arena: (header, arena + b"\0"),
            refused + "group: arena of",
        ),
        "an empty arena": (lambda ticket, header, arena: (header, b""), refused + "group: arena of"),
        "a token that no model knows": (_first_token(2**31 - 1), refused + ".*not below the vocabulary"),
        "a negative token": (_first_token(-1), refused + ".*not below the vocabulary"),
        "lengths that do not fit": (fields(tokens=[1, 2, 3, 4]), refused),
        "a negative length": (fields(tokens=[-1, 2, 3, 4]), refused),
        "lengths of 2**31": (fields(tokens=[2**31 - 1] * 4), refused),
        "no samples": (fields(tokens=[]), refused),
        "rewards for one sample": (fields(rewards=[1.0]), refused + "group: rewards has 1 entries for 4 samples"),
        "a reward that is NaN": (fields(rewards=[float("nan")] * 4), refused + "group: a reward is not finite"),
        "an infinite reward": (fields(rewards=[float("inf")] * 4), refused + "group: a reward is not finite"),
        "a reward part that is NaN": (fields(parts=[{"a": float("nan")}] * 4), refused + "group: a reward part is not"),
        "an infinite temperature": (fields(temperature=float("inf")), refused + "group: temperature is inf"),
        "a prompt that is not there": (fields(prompt=[0, 0, 0, 9]), refused),
        "a column that is not there": (fields(extras=[[0]] * 4), refused),
        "a column of objects": (fields(columns=[["x", "|O8", []]]), refused),
        "a column of 2**248 bytes": (fields(columns=[["x", "<f8", [2**31 - 1] * 8]], extras=[[0]] * 4), refused),
        "a mask that is too short": (fields(masks=[[1]] * 4), refused + "group: loss mask covers"),
        "a finish reason that nobody knows": (fields(finish_reasons=["bored"] * 4), refused),
        "spans with a gap": (lambda ticket, header, arena: (_spans(header, 1), arena), refused + "group: span"),
        "tokens from the future": (
            lambda ticket, header, arena: (_spans(header, 0, ahead=1_000_000), arena),
            refused + ".*never published",
        ),
        "another prompt": (shifted("prompt_index", 1), refused + "it answers"),
        "another task": (fields(task="other"), refused + "it answers other"),
        "an attempt that was never made": (shifted("attempt", 5), refused),
        "a group that was never issued": (shifted("group_id", 1_000_000), refused),
        "another protocol version": (fields(v=3), "protocol version 3"),
        "a field that nobody knows": (fields(admin=True), refused),
        "one rollout for four": (fields(branches=[4]), refused + r"1 rollouts, generate\.group_size=4"),
        "a rollout without a sample": (fields(branches=[0, 1, 1, 2]), refused + "group: branches: 4 samples in 4"),
        "a branch that is not there": (fields(branches=[1, 1, 1, 2]), refused + "group: branches: 5 samples in 4"),
    }
    for name, (spoil, expected) in spoilt.items():
        yield Kind(name, "answer", expected, _answer(spoil))
    yield Kind(
        "answers that no row holds", "answer", refused + ".*learner.tokens_per_micro_batch=", _samples(4, 200_000)
    )
    yield Kind("one sample for four", "answer", refused + r"1 samples, generate\.group_size=4", _samples(1))
    yield Kind("400 samples for four", "answer", refused + r"400 samples, generate\.group_size=4", _samples(400))
    many = refused + r"a rollout of 100 branches, task\.max_branches="
    yield Kind("rollouts of 100 branches", "answer", many, _branches)
    yield Kind("a header without its arena", "answer", "malformed", _half)
    yield Kind("another worker's ticket", "answer", refused + ".*is the ticket of worker", _stolen)
    yield Kind("the same group twice", "answer", "^Accepted, Accepted$", _twice)


def _first_token(token: int) -> Spoil:
    """The answer's first one, behind a prompt of four."""
    return lambda ticket, header, arena: (header, arena[:16] + token.to_bytes(4, "little", signed=True) + arena[20:])


def _spans(header: bytes, start: int, ahead: int = 0) -> bytes:
    """Every sample's only span begins at token `start`, and its version is `ahead` steps newer."""
    spans = msgspec.msgpack.decode(header)["spans"]
    for (span,) in spans:
        span["start"] = start
        span["version"]["step"] += ahead
    return changed(header, spans=spans)


def _frames(circle: Circle, ticket: Ticket, size: int, name: str, tokens: int = TOKENS) -> Frames:
    header, arena = encode_group(
        make_group(ticket, ticket.issued_version, size, name, tokens), circle.config.stream.max_message
    )
    return header, bytes(arena)


def _with_ticket(act: Callable[[Circle, Member, Ticket], str]) -> Callable[[Circle, str], str]:
    def acted(circle: Circle, address: str) -> str:
        with Member(address, circle.keys) as member:
            ticket = member.ticket(circle.run, V0)
            seen = act(circle, member, ticket)
            member.send(Bye())
            time.sleep(0.02)  # it has left
            return seen

    return acted


def _answer(spoil: Spoil) -> Callable[[Circle, str], str]:
    def act(circle: Circle, member: Member, ticket: Ticket) -> str:
        member.send(*spoil(ticket, *_frames(circle, ticket, circle.config.generate.group_size, member.name)))
        return _seen(circle, member)

    return _with_ticket(act)


def _samples(count: int, tokens: int = TOKENS) -> Callable[[Circle, str], str]:
    def act(circle: Circle, member: Member, ticket: Ticket) -> str:
        member.send(*_frames(circle, ticket, count, member.name, tokens))
        return _seen(circle, member)

    return _with_ticket(act)


@_with_ticket
def _branches(circle: Circle, member: Member, ticket: Ticket) -> str:
    header, arena = _frames(circle, ticket, 400, member.name)
    member.send(changed(header, branches=[100] * 4), arena)
    return _seen(circle, member)


@_with_ticket
def _half(circle: Circle, member: Member, ticket: Ticket) -> str:
    member.send(_frames(circle, ticket, circle.config.generate.group_size, member.name)[0])
    return _seen(circle, member)


@_with_ticket
def _stolen(circle: Circle, member: Member, ticket: Ticket) -> str:
    with Member(circle.address, circle.keys, "thief") as thief:
        thief.join(circle.run, V0)
        thief.send(*_frames(circle, ticket, circle.config.generate.group_size, thief.name))
        seen = _seen(circle, thief)
        thief.send(Bye())
        return seen


@_with_ticket
def _twice(circle: Circle, member: Member, ticket: Ticket) -> str:
    frames = _frames(circle, ticket, circle.config.generate.group_size, member.name)
    answers = []
    for _ in range(2):
        member.send(*frames)
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            message = member.receive()
            if isinstance(message, Accepted | Refused):
                answers.append(_described(message))
                break
    return ", ".join(answers)
