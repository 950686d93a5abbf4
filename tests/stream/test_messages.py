"""Messages: whatever arrives is either a checked message or a reason."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.stream.messages import (
    PROTOCOL,
    Accepted,
    Announce,
    Applied,
    BatchHeader,
    BatchStats,
    Bye,
    Credit,
    Evaluated,
    Exited,
    Finished,
    Heartbeat,
    Hello,
    Lost,
    MalformedMessage,
    Measured,
    Message,
    Mismatch,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Refused,
    Roster,
    ScoredAnswer,
    ServerState,
    Stop,
    Tickets,
    decode,
    encode,
)
from streamrl.types import PolicyVersion, Ticket

V = PolicyVersion(21, incarnation=1)
SERVER = ServerState(name="server-0", version=V, world_size=2)
TICKET = Ticket(group_id=7, attempt=1, task="copy", prompt_index=7, seed=3, issued_version=V, deadline=12.5)
STATS = BatchStats(tokens_generated=9, generator_busy=0.5, groups=2, bytes=77)
SCORED = ScoredAnswer(ids=[5, 6, 7, 8, 2], prompt=2, trained=[0, 2], logprobs=[-1.0, -2.0], former=[-1.5, -2.5])
ONE_OF_EACH = [
    Hello(run="r", role="generator", name="generator-0", servers=(SERVER,)),
    Hello(run="r", role="learner", name="learner-0", version=V),
    Credit(capacity=32),
    Heartbeat(tickets=((7, 1), (8, 0)), busy=1.5, generated=1000),
    Applied(server="server-0", version=V),
    PublishFailed(server="server-0", version=V, reason="it went away"),
    Mismatch(server="server-0", version=V, metrics={"mismatch/mean": 1e-3}),
    Evaluated(version=V, metrics={"eval/copy/pass@1": 0.5}),
    Bye(),
    Tickets(tickets=(TICKET,)),
    Accepted(group_id=7, attempt=1),
    Refused(group_id=7, attempt=0, reason="late"),
    Publish(server="server-0", version=V, manifest={"buckets": [1, 2], "dtype": "float32"}, scored=(SCORED,)),
    Stop(reason="done"),
    Next(step=3),
    Lost(step=3),
    Measured(step=3, ess=(0.5, None, 1.0)),
    Progress(version=V, signals={"offpolicy/ess": 0.5}),
    Finished(version=V),
    Exited(version=V, reason="run.exit_interval=7 divides step 21"),
    BatchHeader(step=3, groups=8, stats=STATS),
    Announce(version=V),
    Roster(servers=(SERVER,)),
]
PROGRESS = {"v": PROTOCOL, "kind": "progress", "version": {"step": 1, "incarnation": 0}}
ANSWER = msgspec.to_builtins(SCORED)
PUBLISH = {**PROGRESS, "kind": "publish", "server": "server-0", "manifest": {}}
CREDIT = {"v": PROTOCOL, "kind": "credit", "capacity": 3}


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_every_field_of_a_wrong_type_is_refused_by_its_name(message: Message) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    for name in fields.keys() - {"v", "kind"}:
        with pytest.raises(MalformedMessage, match=name):
            decode(msgspec.msgpack.encode({**fields, name: b"wrong"}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**CREDIT, "v": 1}, "protocol version 1, this process speaks 11"),
        ({**CREDIT, "kind": "debit"}, "unknown kind 'debit'"),
        ({**CREDIT, "extra": 1}, "unknown field `extra`"),
        ({"v": PROTOCOL, "kind": "credit"}, "missing required field `capacity`"),
        ({"kind": "credit", "capacity": 3}, "missing required field `v`"),
        ({**CREDIT, "capacity": -1}, "capacity"),
        ({**CREDIT, "capacity": True}, "capacity"),
        ({"v": PROTOCOL, "kind": "heartbeat", "busy": float("nan")}, "busy"),
        ({"v": PROTOCOL, "kind": "announce", "version": {"step": -1, "incarnation": 0}}, "out of range"),
        ({**PROGRESS, "signals": {"offpolicy/ess": float("nan")}}, "signals that are not finite: offpolicy/ess"),
        ({**PROGRESS, "signals": {str(name): 0.0 for name in range(65)}}, "length <= 64"),
        ({**PUBLISH, "scored": [{**ANSWER, "former": [-1.0]}]}, "as many log-probs as trained tokens"),
        ({**PUBLISH, "scored": [{**ANSWER, "trained": [0, 3]}]}, "a trained token behind its last one"),
        ({"v": PROTOCOL, "kind": "hello", "run": "r", "role": "learner", "name": "l"}, "learner without its version"),
        ({"v": PROTOCOL, "kind": "hello", "run": "r", "role": "king", "name": "l"}, "role"),
        ({"v": PROTOCOL, "kind": "hello", "role": "generator", "name": "l"}, "missing required field `run`"),
        ([], "Expected `object`"),
    ],
)
def test_a_malformed_message_is_refused_with_its_reason(fields: object, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason):
        decode(msgspec.msgpack.encode(fields))


def test_hostile_lengths_and_depths_are_refused() -> None:
    deep = b"\x85\xa1v\x01\xa4kind\xa7publish\xa6server\xa1a\xa7version\x82\xa4step\x01\xabincarnation\x00\xa8manifest"
    for frame in (
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x83\xa1v\x01\xa4kind\xa9heartbeat\xa7tickets\xdd\xff\xff\xff\xff\x92\x00\x00",
        deep + b"\x81\xa1a" * 100_000 + b"\x00",
        encode(Stop(reason="abc")).replace(b"abc", b"\xff\xfe\xff"),
    ):
        with pytest.raises(MalformedMessage):
            decode(frame)


@given(message=st.sampled_from(ONE_OF_EACH), data=st.data())
def test_damaged_frames_are_read_or_refused_and_nothing_else(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 6))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        again = encode(decode(bytes(frame[: data.draw(st.integers(0, len(frame)))])))
        assert encode(decode(again)) == again
