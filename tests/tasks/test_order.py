"""Epochs and permutations of prompts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.tasks.order import is_held_out, item_at, permute


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**31), st.integers(0, 5))
def test_every_epoch_shows_each_item_exactly_once(size, seed, epoch):
    shown = [item_at(index, size, seed) for index in range(epoch * size, (epoch + 1) * size)]
    assert sorted(shown) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    first = [item_at(index, 100, seed=1) for index in range(100)]
    second = [item_at(index, 100, seed=1) for index in range(100, 200)]
    other = [item_at(index, 100, seed=2) for index in range(100)]
    assert first != second
    assert first != other
    assert first != sorted(first)


def test_an_order_has_no_visible_structure():
    size, seeds = 100, 400
    mean = sum(item_at(0, size, seed) for seed in range(seeds)) / seeds
    assert abs(mean - (size - 1) / 2) < 5  # three standard errors of a uniform draw are 4.3
    assert len({item_at(0, size, seed) for seed in range(seeds)}) > 90


def test_a_large_set_needs_no_memory():
    size = 10**12 + 7
    places = range(0, size, size // 50)
    assert len({permute(place, size, "k") for place in places}) == len(places)
    with pytest.raises(ValueError, match="not in 0"):
        permute(size, size, "k")


def test_the_held_out_share_is_about_what_was_asked():
    share = sum(is_held_out(f"question {index}", 0.1) for index in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_neither_tasks_nor_their_libraries_import_torch():
    check = """
        import sys
        import streamrl.tasks.user_reward
        from streamrl.choices import TASKS
        assert len([TASKS.load(name) for name in TASKS.names]) > 10
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(check)], check=True, timeout=120)
