"""What changed, and back: bit for bit, small where little changed, and never more than what was sent can say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.publish.delta_codec import CHUNK, apply, encode


def changed(base: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A copy of uint16 words with so large a share of them different."""
    random = np.random.default_rng(seed)
    new = base.copy()
    places = random.random(len(base)) < share
    new[places] ^= random.integers(1, 1 << 16, int(places.sum()), dtype=np.uint16)
    return new


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.03, 0.4])
def test_what_changed_leads_from_the_one_to_the_other_bit_for_bit(share):
    base = np.random.default_rng(0).integers(0, 1 << 16, 2 * CHUNK + 12_345, dtype=np.uint16)
    new = changed(base, share, 1)
    delta = encode(base.view(np.uint8), new.view(np.uint8), 2)
    assert delta is not None
    apply(base.view(np.uint8), delta)
    assert (base == new).all()


def test_three_in_a_hundred_changed_is_more_than_twenty_times_smaller():
    base = np.random.default_rng(0).integers(0, 1 << 16, 2 * CHUNK, dtype=np.uint16)
    delta = encode(base.view(np.uint8), changed(base, 0.03, 1).view(np.uint8), 2)
    assert delta is not None
    assert base.nbytes / len(delta) > 20


def test_what_changed_everywhere_is_not_encoded():
    base = np.zeros(1000, np.uint16)
    assert encode(base.view(np.uint8), (base + 1).view(np.uint8), 2) is None


def test_numbers_are_compared_as_bytes():
    base = np.array([0.0, np.nan] * 100, np.float32)
    new = base.copy()
    new[0] = -0.0
    delta = encode(base.view(np.uint8), new.view(np.uint8), 4)
    assert delta is not None
    apply(base.view(np.uint8), delta)
    assert base.tobytes() == new.tobytes()


@settings(max_examples=200)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(1, 3000))
def test_any_change_of_any_words_is_undone_by_nothing(data, word, count):
    base = np.random.default_rng(count).integers(0, 256, count * word, dtype=np.uint8)
    new = base.copy()
    for place in data.draw(st.lists(st.integers(0, len(base) - 1), max_size=20)):
        new[place] ^= data.draw(st.integers(0, 255))
    delta = encode(base, new, word)
    if delta is not None:
        assert len(delta) < len(new)
        apply(base, delta)
        assert (base == new).all()


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_bytes_that_are_no_delta_are_refused_and_touch_nothing_outside(content, cut):
    room = np.zeros(1024, np.uint8)
    target = room[256:768]
    whole = encode(np.zeros(512, np.uint8), np.arange(512, dtype=np.uint8) % 7 // 6, 2)
    assert whole is not None
    for delta in (content, whole[: cut % len(whole)], b"\x02" + content):
        with pytest.raises(ValueError, match=r"no delta of|behind the delta"):
            apply(target, delta)
    assert not room[:256].any()
    assert not room[768:].any()
