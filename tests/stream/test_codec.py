"""The two-frame encoding: groups survive the wire bit for bit, and nothing that is wrong gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.structs import replace

from streamrl.config.replay import StreamConfig
from streamrl.stream.codec import OLDEST, decode_batch, decode_group, encode_group, ticket_of
from streamrl.stream.messages import PROTOCOL, BatchHeader, BatchStats, MalformedMessage
from streamrl.stream.sockets import Dealer, ReceivedBatch, Router
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

MAX = 1 << 20
STREAM = StreamConfig(max_message=MAX, reply_timeout=10.0, curve="off")
STATS = BatchStats(tokens_generated=9, generator_busy=0.5, groups=2, bytes=77)
MakeGroup = Callable[..., Group]
DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8")
_INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def _spans(draw: st.DrawFn, tokens: int) -> tuple[VersionSpan, ...]:
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
    ends = sorted({*inner, tokens} - {0})
    versions = sorted(
        draw(st.lists(st.builds(PolicyVersion, *[st.integers(0, 99)] * 2), min_size=len(ends), max_size=len(ends)))
    )
    exact = draw(st.lists(st.booleans(), min_size=len(ends), max_size=len(ends)))
    return tuple(VersionSpan(*span) for span in zip(versions, [0, *ends], ends, exact, strict=False))


@st.composite
def _extras(draw: st.DrawFn, tokens: int) -> dict[str, np.ndarray]:
    """Fields of every dtype that travels, with up to two further dimensions, empty ones included."""
    extras = {}
    for name in draw(st.sets(st.sampled_from(["routed_experts", "top_logprobs", "mask", ""]), max_size=2)):
        shape = (tokens, *draw(st.lists(st.integers(0, 3), max_size=2)))
        dtype = np.dtype(draw(st.sampled_from([name.lstrip("|<") for name in DTYPES])))
        extras[name] = draw(npst.arrays(dtype, shape))
    return extras


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
        extras=draw(_extras(tokens)),
    )


@st.composite
def any_group(draw: st.DrawFn) -> Group:
    """Prompts shared, equal and distinct; answers empty and long; masks and spans of every shape."""
    prompts = draw(st.lists(npst.arrays(np.int32, st.integers(0, 9), elements=_INT32), min_size=1, max_size=3))
    samples = tuple(draw(st.lists(_samples(prompts), min_size=1, max_size=5)))
    images = tuple(draw(st.lists(st.binary(min_size=1, max_size=9), max_size=3)))
    return Group(
        group_id=draw(st.integers(0, 2**53)),
        attempt=draw(st.integers(0, 9)),
        task=draw(st.text(min_size=1, max_size=9)),
        prompt_index=draw(st.integers(0, 2**53)),
        samples=samples,
        branches=() if images else draw(_branches(samples)),
        started=draw(st.floats(0, 1e10)),
        finished=draw(st.floats(0, 1e10)),
        worker=draw(st.text(max_size=9)),
        images=images,
    )


@st.composite
def _branches(draw: st.DrawFn, samples: tuple[Sample, ...]) -> tuple[int, ...]:
    """Of each rollout how many of these samples it has; a placeholder represents a whole one."""
    counts: list[int] = []
    for place, sample in enumerate(samples):
        alone = sample.is_placeholder or (place > 0 and samples[place - 1].is_placeholder)
        if not counts or alone or draw(st.booleans()):
            counts.append(1)
        else:
            counts[-1] += 1
    return draw(st.sampled_from([(), tuple(counts)]))


def assert_same(left: Group, right: Group) -> None:
    """Equal in every bit."""
    for name in ("group_id", "attempt", "task", "prompt_index", "branches", "started", "finished", "worker", "images"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(left.samples) == len(right.samples)
    for a, b in zip(left.samples, right.samples, strict=True):
        for name in ("prompt_ids", "output_ids", "logprobs", "loss_mask"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x.dtype, x.tobytes()) == (y.dtype, y.tobytes()), name
        for name in ("spans", "reward", "reward_parts", "finish_reason"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.extras.keys() == b.extras.keys()
        for name, x in a.extras.items():
            y = b.extras[name]
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


@pytest.fixture(scope="module")
def wire() -> Iterator[tuple[Router, Dealer]]:
    router = Router("tcp://127.0.0.1:0", STREAM)
    dealer = Dealer(router.address, STREAM, None, "learner")
    yield router, dealer
    dealer.close()
    router.close()


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(group=any_group())
def test_a_group_survives_real_sockets_there_and_back_bit_for_bit(wire: tuple[Router, Dealer], group: Group) -> None:
    router, dealer = wire
    dealer.send(group)
    received = router.receive(10.0)
    assert received is not None
    identity, frames, *_ = received
    assert_same(decode_group(*frames), group)
    assert ticket_of(frames[0]) == (group.group_id, group.attempt)
    router.send(identity, BatchHeader(step=4, groups=2, stats=STATS), [*frames, *frames])
    reply = dealer.receive(10.0)
    assert isinstance(reply, ReceivedBatch)
    assert (reply.batch.step, reply.stats["bytes"]) == (4, 77)
    for returned in reply.batch.groups:
        assert_same(returned, group)


def test_a_group_from_before_tokens_could_be_inexact_is_exact_and_such_groups_look_as_they_did(
    make_group: MakeGroup,
) -> None:
    group = make_group(3)
    header, arena = encode_group(group, MAX)
    told = msgspec.msgpack.decode(header)
    assert all(span.keys() == {"version", "start", "end"} for spans in told["spans"] for span in spans)
    old = msgspec.msgpack.encode(told | {"v": OLDEST})
    assert all(span.exact for sample in decode_group(old, arena).samples for span in sample.spans)


def test_decoded_arrays_are_read_only_views_of_the_received_frame(make_group: MakeGroup) -> None:
    header, arena = encode_group(make_group(3, tokens=100), MAX)
    received = np.frombuffer(bytes(arena), np.uint8)
    for sample in decode_group(header, received.data).samples:
        for array in (sample.prompt_ids, sample.output_ids, sample.logprobs):
            assert np.shares_memory(array, received)
            assert not array.flags.writeable
        assert not sample.loss_mask.flags.writeable


def _with_extras(group: Group) -> Group:
    """Sample 0 has experts and a sampling mask, sample 1 the experts alone."""
    random = np.random.default_rng(1)
    first, second = (
        {"experts": random.integers(0, 128, (len(sample.output_ids), 2, 3), dtype=np.int16)} for sample in group.samples
    )
    first["kept"] = random.random(len(group.samples[0].output_ids)) < 0.5
    first["margin"] = random.random(len(group.samples[0].output_ids))
    samples = [replace(sample, extras=extras) for sample, extras in zip(group.samples, (first, second), strict=True)]
    return replace(group, samples=tuple(samples))


def test_images_travel_with_their_group_each_content_once(make_group: MakeGroup) -> None:
    plain, shown = make_group(3), (b"one image", b"another", b"one image")
    for group in (plain, _with_extras(plain)):
        frames = encode_group(replace(group, images=shown), MAX)
        sizes = [len(arena) for _, arena in (encode_group(group, MAX), frames)]
        assert sizes[1] - sizes[0] == len(shown[0] + shown[1])
        for _ in range(2):
            read = decode_group(*frames)
            assert_same(read, replace(group, images=shown))
            frames = encode_group(read, MAX)
        assert read.emptied.images == ()


def test_a_new_field_of_each_token_travels_without_a_line_of_code(make_group: MakeGroup) -> None:
    group = _with_extras(make_group(3))
    header, arena = encode_group(group, MAX)
    decoded = decode_group(header, memoryview(b"x" + bytes(arena))[1:])  # at an odd address too
    assert_same(decoded, group)
    for sample in decoded.samples:
        for column in sample.extras.values():
            assert column.flags.aligned
            assert not column.flags.writeable


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f["columns"][0].__setitem__(1, "<c8"), "Invalid enum value '<c8'"),
        (lambda f: f["columns"][0].__setitem__(1, "|O8"), "Invalid enum value '|O8'"),
        (lambda f: f["columns"][0].__setitem__(2, [2, 4]), "the header asks for"),
        (lambda f: f["columns"][0].__setitem__(2, [2**31 - 1] * 8), "the header asks for"),
        (lambda f: f["columns"][0].__setitem__(2, [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]), "the header asks for"),
        (lambda f: f["columns"].pop(), "column beyond the 2"),
        (lambda f: f["extras"][1].append(2), "the header asks for"),
        (lambda f: f["extras"][0].append(0), "the header asks for"),
        (lambda f: f["columns"][2].__setitem__(0, "kept"), r"sample 0 has extras\['kept'\] twice"),
        (lambda f: f["columns"][0].__setitem__(slice(1, 3), ["|b1", [2, 2, 3]]), "bytes that are no bool"),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_their_reason(
    make_group: MakeGroup, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    header, arena = encode_group(_with_extras(make_group(3)), MAX)
    with pytest.raises(MalformedMessage, match=reason):
        decode_group(_changed(header, change), arena)


def test_a_dtype_that_does_not_travel_is_refused_by_its_field(make_group: MakeGroup) -> None:
    group = make_group(3)
    strange = replace(group.samples[0], extras={"phase": np.zeros(5, np.complex64)})
    with pytest.raises(ValueError, match=r"extras\['phase'\] is complex64"):
        encode_group(replace(group, samples=(strange,)), MAX)


def test_an_arena_that_is_used_again_carries_nothing_over(make_group: MakeGroup) -> None:
    used = np.full(1 << 12, 255, np.uint8)
    fresh = encode_group(_with_extras(make_group(3)), MAX)
    again = encode_group(_with_extras(make_group(3)), MAX, lambda size: used[:size])
    assert [bytes(frame) for frame in again] == [bytes(frame) for frame in fresh]


def test_a_frame_at_an_odd_address_decodes_to_aligned_arrays(make_group: MakeGroup) -> None:
    group = make_group(3)
    header, arena = encode_group(group, MAX)
    decoded = decode_group(header, memoryview(b"x" + bytes(arena))[1:])
    assert_same(decoded, group)
    assert all(sample.logprobs.flags.aligned for sample in decoded.samples)


def test_a_shared_prompt_and_eight_bytes_a_token_are_all_that_travels(make_group: MakeGroup) -> None:
    _, arena = encode_group(make_group(3, samples=16, tokens=1000), MAX)
    assert arena.nbytes == 4 * 7 + 8 * 16 * 1000


def _changed(frame: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    fields = msgspec.msgpack.decode(frame)
    change(fields)
    return msgspec.msgpack.encode(fields)


def _span(step: int, start: int, end: int) -> dict[str, Any]:
    return {"version": {"step": step, "incarnation": 0}, "start": start, "end": end}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f.update(v=PROTOCOL + 1), f"protocol version {PROTOCOL + 1}"),
        (lambda f: f.update(kind="credit"), "a group is expected"),
        (lambda f: f.update(group_id="x"), "group_id"),
        (lambda f: f.update(worker=1), "worker"),
        (lambda f: f.update(tokens=[]), "no samples"),
        *[
            (lambda f, name=name: f[name].pop(), f"{name} has 1 entries for 2 samples")
            for name in ("prompt", "spans", "masks", "rewards", "parts", "finish_reasons", "extras")
        ],
        (lambda f: f["prompts"].append(5), "arena of 108 bytes, the header asks for 128"),
        (lambda f: f["prompt"].__setitem__(1, 4), "prompt 4 of 1"),
        (lambda f: f["spans"].__setitem__(1, [_span(0, 0, 4)]), "spans cover 4 of 5"),
        (lambda f: f["spans"].__setitem__(1, [_span(0, 0, 2), _span(0, 3, 5)]), "3..5 does not continue at 2"),
        (lambda f: f["spans"].__setitem__(1, [_span(0, 0, 5), _span(0, 5, 5)]), "5..5 does not continue at 5"),
        (lambda f: f["spans"].__setitem__(1, [_span(1, 0, 2), _span(0, 2, 5)]), "version 0.0 follows 1.0"),
        (lambda f: f["spans"].__setitem__(1, [_span(2**31, 0, 5)]), "version 2147483648.0"),
        (lambda f: f["spans"].__setitem__(1, [_span(-1, 0, 5)]), "version -1.0"),
        (lambda f: f["masks"].__setitem__(1, [2]), "loss mask covers 2 of 5"),
        (lambda f: f["rewards"].__setitem__(1, float("nan")), r"a reward is not finite: \[.*nan"),
        (lambda f: f["finish_reasons"].__setitem__(1, "tired"), "tired"),
        (lambda f: f["images"].append(5), r"places \[\] of 1 images"),
        (lambda f: f["image"].append(0), r"places \[0\] of 0 images"),
        (lambda f: f.update(images=[0], image=[0]), "none is empty"),
        (lambda f: f.update(images=[5], image=[0]), "arena of 108 bytes, the header asks for 113"),
        (lambda f: f.update(branches=[1]), "branches: 1 samples in 1 rollouts, 2 are there"),
        (lambda f: f.update(branches=[2, 1]), "branches: 3 samples in 2 rollouts, 2 are there"),
        (lambda f: f.update(branches=[0, 2]), "branches: 2 samples in 2 rollouts, 2 are there, one at least in each"),
        (lambda f: f.update(branches=[3, -1]), "branches"),
        (lambda f: f.update(branches=[2**60, 2]), "branches"),
        (lambda f: f.update(branches="2"), "branches"),
        (lambda f: f["finish_reasons"].__setitem__(1, "placeholder") or f.update(branches=[2]), "a placeholder is one"),
    ],
)
def test_a_group_whose_header_is_wrong_is_refused_with_its_reason(
    make_group: MakeGroup, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    header, arena = encode_group(make_group(3), MAX)
    with pytest.raises(MalformedMessage, match=reason):
        decode_group(_changed(header, change), arena)


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


def test_the_reason_of_a_failed_sample_travels_and_one_that_nobody_knows_is_refused(make_group: MakeGroup) -> None:
    group = make_group(samples=3)
    failed = replace(group, samples=(group.samples[0], Sample.placeholder(failure="too_long"), Sample.placeholder()))
    header, arena = encode_group(failed, MAX)
    assert [sample.failure for sample in decode_group(header, arena).samples] == ["", "too_long", ""]

    def refused(failures: dict[int, str], reason: str) -> None:
        with pytest.raises(MalformedMessage, match=reason):
            decode_group(_changed(header, lambda fields: fields.update(failures=failures)), arena)

    refused({1: "a whim"}, "failures")
    refused({0: "too_long"}, "a failure of sample 0, which is no placeholder")
    refused({3: "too_long"}, "a failure of sample 3, which is no placeholder")


def test_a_group_from_before_failures_had_reasons_is_read(make_group: MakeGroup) -> None:
    group = replace(make_group(samples=2), samples=(make_group().samples[0], Sample.placeholder()))
    header, arena = encode_group(group, MAX)
    assert decode_group(_changed(header, lambda fields: fields.pop("failures")), arena).samples[1].failure == ""


@settings(max_examples=60)
@given(group=any_group())
def test_a_group_decodes_as_it_was_encoded_branches_and_all(group: Group) -> None:
    decoded = decode_group(*encode_group(group, MAX))
    assert_same(decoded, group)
    assert [len(rollout) for rollout in decoded.rollouts] == list(group.branches or (1,) * len(group.samples))


def test_branches_with_images_are_refused_at_both_ends(make_group: MakeGroup) -> None:
    group = replace(make_group(3), branches=(2,))
    with pytest.raises(ValueError, match=r"group 3\.branches of a group with images"):
        encode_group(replace(group, images=(b"x",)), MAX)
    header, arena = encode_group(replace(group, branches=(), images=(b"x",)), MAX)
    with pytest.raises(MalformedMessage, match="branches of a group with images"):
        decode_group(_changed(header, lambda fields: fields.update(branches=[2])), arena)


def test_a_group_of_a_peer_without_branches_is_read_as_before(make_group: MakeGroup) -> None:
    header, arena = encode_group(make_group(3), MAX)
    older = _changed(header, lambda fields: (fields.pop("branches"), fields.update(v=8)))
    assert_same(decode_group(older, arena), make_group(3))
