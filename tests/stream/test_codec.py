"""The two-frame encoding: groups survive the wire bit for bit, and nothing that is wrong gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from streamrl.config import StreamConfig
from streamrl.stream.codec import decode_batch, decode_group, encode_group, ticket_of
from streamrl.stream.messages import BatchHeader, BatchStats, MalformedMessage
from streamrl.stream.sockets import Dealer, ReceivedBatch, Router
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

MAX = 1 << 20
STREAM = StreamConfig(max_message=MAX, reply_timeout=10.0)
STATS = BatchStats(tokens_generated=9, generator_busy=0.5, groups=2, bytes=77)
MakeGroup = Callable[..., Group]
_INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def _spans(draw: st.DrawFn, tokens: int) -> tuple[VersionSpan, ...]:
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
    ends = sorted({*inner, tokens} - {0})
    versions = sorted(
        draw(st.lists(st.builds(PolicyVersion, *[st.integers(0, 99)] * 2), min_size=len(ends), max_size=len(ends)))
    )
    return tuple(VersionSpan(v, s, e) for v, s, e in zip(versions, [0, *ends], ends, strict=False))


@st.composite
def _samples(draw: st.DrawFn, prompts: list[np.ndarray]) -> Sample:
    tokens = draw(st.integers(0, 40))
    return Sample(
        prompt_ids=draw(st.sampled_from(prompts)),
        output_ids=draw(npst.arrays(np.int32, tokens, elements=_INT32)),
        logprobs=draw(npst.arrays(np.float32, tokens)),  # NaN and infinities included
        loss_mask=draw(npst.arrays(np.bool_, tokens)),
        spans=draw(_spans(tokens)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=3)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "placeholder"])),
    )


@st.composite
def any_group(draw: st.DrawFn) -> Group:
    """Prompts shared, equal and distinct; answers empty and long; masks and spans of every shape."""
    prompts = draw(st.lists(npst.arrays(np.int32, st.integers(0, 9), elements=_INT32), min_size=1, max_size=3))
    return Group(
        group_id=draw(st.integers(0, 2**53)),
        attempt=draw(st.integers(0, 9)),
        task=draw(st.text(min_size=1, max_size=9)),
        prompt_index=draw(st.integers(0, 2**53)),
        samples=tuple(draw(st.lists(_samples(prompts), min_size=1, max_size=5))),
        started=draw(st.floats(0, 1e10)),
        finished=draw(st.floats(0, 1e10)),
        worker=draw(st.text(max_size=9)),
    )


def assert_same(left: Group, right: Group) -> None:
    """Equal in every bit."""
    for name in ("group_id", "attempt", "task", "prompt_index", "started", "finished", "worker"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(left.samples) == len(right.samples)
    for a, b in zip(left.samples, right.samples, strict=True):
        for name in ("prompt_ids", "output_ids", "logprobs", "loss_mask"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x.dtype, x.tobytes()) == (y.dtype, y.tobytes()), name
        for name in ("spans", "reward", "reward_parts", "finish_reason"):
            assert getattr(a, name) == getattr(b, name), name


@pytest.fixture(scope="module")
def wire() -> Iterator[tuple[Router, Dealer]]:
    router = Router("tcp://127.0.0.1:0", STREAM)
    dealer = Dealer(router.address, STREAM, "learner")
    yield router, dealer
    dealer.close()
    router.close()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(group=any_group())
def test_a_group_survives_real_sockets_there_and_back_bit_for_bit(wire: tuple[Router, Dealer], group: Group) -> None:
    router, dealer = wire
    dealer.send_group(group)
    received = router.receive(10.0)
    assert received is not None
    identity, frames = received
    assert_same(decode_group(*(frame.buffer for frame in frames)), group)
    assert ticket_of(frames[0].buffer) == (group.group_id, group.attempt)
    router.send(identity, BatchHeader(step=4, groups=2, stats=STATS), [*frames, *frames])
    reply = dealer.receive(10.0)
    assert isinstance(reply, ReceivedBatch)
    assert (reply.batch.step, reply.stats["bytes"]) == (4, 77)
    for returned in reply.batch.groups:
        assert_same(returned, group)


def test_decoded_arrays_are_read_only_views_of_the_received_frame(make_group: MakeGroup) -> None:
    header, arena = encode_group(make_group(3, tokens=100), MAX)
    received = np.frombuffer(bytes(arena), np.uint8)
    for sample in decode_group(header, received.data).samples:
        for array in (sample.prompt_ids, sample.output_ids, sample.logprobs):
            assert np.shares_memory(array, received)
            assert not array.flags.writeable
        assert not sample.loss_mask.flags.writeable


def test_a_frame_at_an_odd_address_decodes_to_aligned_arrays(make_group: MakeGroup) -> None:
    group = make_group(3)
    header, arena = encode_group(group, MAX)
    decoded = decode_group(header, memoryview(b"x" + bytes(arena))[1:])
    assert_same(decoded, group)
    assert all(sample.logprobs.flags.aligned for sample in decoded.samples)


def test_a_shared_prompt_and_eight_bytes_a_token_are_all_that_travels(make_group: MakeGroup) -> None:
    _, arena = encode_group(make_group(3, samples=16, tokens=1000), MAX)
    assert arena.nbytes == 4 * 7 + 8 * 16 * 1000


def _damaged(frame: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    fields = msgspec.msgpack.decode(frame)
    change(fields)
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f.update(v=7), "protocol version 7"),
        (lambda f: f.update(kind="credit"), "a group is expected"),
        (lambda f: f.update(group_id="x"), "group_id"),
        (lambda f: f.update(worker=1), "worker"),
        (lambda f: f.update(samples=[]), "arena of 108 bytes"),
        (lambda f: f["prompts"].append(5), "arena of 108 bytes, the header asks for 128"),
        (lambda f: f["samples"][1].__setitem__(0, 4), "prompt 4 of 1"),
        (lambda f: f["samples"][1].__setitem__(2, [[0, 0, 4]]), "spans cover 4 of 5"),
        (lambda f: f["samples"][1].__setitem__(2, [[1, 0, 2], [0, 0, 5]]), "version falls from 1.0 to 0.0"),
        (lambda f: f["samples"][1].__setitem__(2, [[2**31, 0, 5]]), "samples"),
        (lambda f: f["samples"][1].__setitem__(3, [2]), "loss mask covers 2 of 5"),
        (lambda f: f["samples"][1].__setitem__(4, float("nan")), "reward is nan"),
        (lambda f: f["samples"][1].__setitem__(6, "tired"), "tired"),
    ],
)
def test_a_group_whose_header_is_wrong_is_refused_with_its_reason(
    make_group: MakeGroup, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    header, arena = encode_group(make_group(3), MAX)
    with pytest.raises(MalformedMessage, match=reason):
        decode_group(_damaged(header, change), arena)


def test_a_refusal_names_the_ticket_where_the_header_still_tells_it(make_group: MakeGroup) -> None:
    header, arena = encode_group(make_group(3, attempt=2), MAX)
    with pytest.raises(MalformedMessage) as refusal:
        decode_group(header, arena[:-4])
    assert refusal.value.ticket == (3, 2)


@given(data=st.data())
def test_damaged_groups_are_read_or_refused_and_nothing_else(make_group: MakeGroup, data: st.DataObject) -> None:
    header, arena = encode_group(make_group(3), MAX)
    frame = bytearray(header)
    for _ in range(data.draw(st.integers(0, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 4, 100]))
    with contextlib.suppress(MalformedMessage):
        decode_group(bytes(frame), bytes(arena)[cut:]).check()


def test_a_batch_with_a_frame_missing_is_refused(make_group: MakeGroup) -> None:
    header, arena = encode_group(make_group(3), MAX)
    with pytest.raises(MalformedMessage, match="3 frames for 2 groups"):
        decode_batch(BatchHeader(step=0, groups=2, stats=STATS), [header, arena, header])


def test_a_group_that_no_service_would_accept_is_refused_before_it_is_sent(make_group: MakeGroup) -> None:
    group = make_group(3, tokens=50)
    with pytest.raises(ValueError, match=r"stream\.max_message allows 100"):
        encode_group(group, 100)
    broken = replace(group.samples[0], logprobs=np.zeros(50, np.float64))
    with pytest.raises(ValueError, match=r"group 3 sample 0\.logprobs is float64"):
        encode_group(replace(group, samples=(broken,)), MAX)
