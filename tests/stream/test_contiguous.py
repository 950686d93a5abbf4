"""Numbers that lie as they travel are not copied, and nobody takes other numbers for such."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.stream.arenas import Arenas
from streamrl.stream.codec import decode_group, encode_group
from streamrl.stream.contiguous import answer_arrays, arena_of
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan, all_trained, is_all_trained

MAX = 1 << 20


def in_one_piece(lengths: list[int] = [3, 1, 5]) -> Group:  # noqa: B006  # it is only read
    """A group as the worker makes it of one request's answers."""
    prompt, arrays = answer_arrays(np.array([5, 6], np.int32), lengths)
    for ids, logprobs in arrays:
        ids[:] = range(len(ids))
        logprobs[:] = [-0.5 * number for number in range(len(ids))]
    samples = tuple(
        Sample(
            prompt_ids=prompt,
            output_ids=ids,
            logprobs=logprobs,
            loss_mask=all_trained(len(ids)),
            spans=(VersionSpan(PolicyVersion(1), 0, len(ids)),) if len(ids) else (),
            reward=1.0,
        )
        for ids, logprobs in arrays
    )
    return grouped(samples)


def grouped(samples: tuple[Sample, ...]) -> Group:
    return Group(group_id=1, task="copy", prompt_index=1, samples=samples, arena=arena_of(samples))


def apart(group: Group) -> Group:
    """The same group in arrays of their own."""
    names = ("prompt_ids", "output_ids", "logprobs", "loss_mask")
    own = (replace(sample, **{name: getattr(sample, name).copy() for name in names}) for sample in group.samples)
    return replace(group, samples=tuple(own))


def refuse(size: int) -> np.ndarray:
    raise AssertionError(f"{size} bytes were asked for, nothing is to be copied")


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
@settings(max_examples=50)
def test_a_group_in_one_piece_is_encoded_where_it_lies_and_looks_the_same(lengths: list[int]) -> None:
    group = in_one_piece(lengths)
    frames = encode_group(group, MAX, refuse)
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), group.samples[0].prompt_ids)
    assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in encode_group(apart(group), MAX)]


def test_a_group_that_was_decoded_is_encoded_again_without_a_copy() -> None:
    frames = [bytes(frame) for frame in encode_group(in_one_piece(), MAX)]
    assert [bytes(frame) for frame in encode_group(decode_group(*frames), MAX, refuse)] == frames


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda samples: samples[::-1],
        lambda samples: samples[1:],
        lambda samples: (*samples[:1], *samples[:1], *samples[2:]),
        lambda samples: (samples[0], Sample.placeholder(samples[0].prompt_ids), samples[2]),
        lambda samples: (replace(samples[0], output_ids=samples[0].output_ids.copy()), *samples[1:]),
        lambda samples: (replace(samples[0], logprobs=samples[2].logprobs[:3]), *samples[1:]),
        lambda samples: (replace(samples[0], extras={"top": np.arange(3)}), *samples[1:]),
        lambda samples: (samples[0], replace(samples[1], prompt_ids=np.array([9], np.int32)), samples[2]),
    ],
    ids=["other order", "one less", "one twice", "placeholder", "own ids", "other log-probs", "extras", "prompts"],
)
def test_a_group_that_does_not_lie_as_it_travels_is_copied(
    change: Callable[..., tuple[Sample, ...]], fresh: bool
) -> None:
    samples = change(in_one_piece().samples)
    group = grouped(samples) if fresh else replace(in_one_piece(), samples=samples)
    asked: list[int] = []

    def allocate(size: int) -> np.ndarray:
        asked.append(size)
        return np.empty(size, np.uint8)

    frames = encode_group(group, MAX, allocate)
    assert asked == [len(frames[1])]
    for found, sample in zip(decode_group(*frames).samples, group.samples, strict=True):
        assert np.array_equal(found.prompt_ids, sample.prompt_ids)
        assert np.array_equal(found.output_ids, sample.output_ids)
        assert np.array_equal(found.logprobs, sample.logprobs)


@pytest.mark.parametrize(
    "cut", [lambda whole: whole[::2], lambda whole: whole[4::-1], lambda whole: whole.reshape(5, 2)[:, 1]]
)
def test_numbers_with_steps_between_them_are_no_single_piece(cut: Callable[[np.ndarray], np.ndarray]) -> None:
    whole = np.arange(10, dtype=np.int32)
    (sample,) = in_one_piece([5]).samples
    parts = {"prompt_ids": whole[:0], "logprobs": whole[5:].view(np.float32)}
    assert arena_of((replace(sample, **parts, output_ids=whole[:5]),)) is not None
    assert arena_of((replace(sample, **parts, output_ids=cut(whole)),)) is None


def test_an_arena_with_several_prompts_or_columns_is_not_taken_over_from_a_peer() -> None:
    samples = in_one_piece().samples
    other = replace(samples[1], prompt_ids=np.array([9], np.int32))
    assert decode_group(*encode_group(grouped((samples[0], other)), MAX)).arena is None
    wide = tuple(replace(sample, extras={"top": np.arange(len(sample.output_ids))}) for sample in samples)
    assert decode_group(*encode_group(grouped(wide), MAX)).arena is None


def test_only_memory_that_was_allocated_is_lent() -> None:
    arenas, group = Arenas(), in_one_piece()
    _, copied = encode_group(apart(group), MAX, arenas.allocate)
    assert arenas.gave(copied)
    _, own = encode_group(group, MAX, arenas.allocate)
    assert not arenas.gave(own)
    assert not Arenas().gave(own)


def test_samples_that_are_badly_formed_have_no_arena() -> None:
    samples = in_one_piece().samples
    assert arena_of((replace(samples[0], reward=np.nan), *samples[1:])) is None
    assert arena_of((replace(samples[0], spans=()), *samples[1:])) is None


@pytest.mark.parametrize("length", [0, 1, 1 << 14, (1 << 14) + 1, 100_000])
def test_masks_of_answers_that_are_trained_whole_are_one_memory(length: int) -> None:
    mask = all_trained(length)
    assert len(mask) == length
    assert mask.all()
    assert not mask.flags.writeable
    assert is_all_trained(mask)
    assert is_all_trained(mask.copy())
    assert length == 0 or np.shares_memory(mask, all_trained(length))
    assert length < 2 or not is_all_trained(np.arange(length) > 0)
