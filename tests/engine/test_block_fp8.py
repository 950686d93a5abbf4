"""Weights in FP8 by blocks, against a slow reference that looks for the nearest of the 253 values that e4m3 has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.engine import block_fp8
from streamrl.engine.block_fp8 import BLOCK, dequantise, quantise, quantise_activations


def e4m3_values() -> np.ndarray:
    """Every finite value of e4m3 by its definition: sign, four bits of exponent (bias 7), three of mantissa."""
    found = set()
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) == (15, 7):  # NaN
                continue
            value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            found |= {value, -value}
    return np.array(sorted(found))


VALUES = e4m3_values()


def slow(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales, and the distance of weight / scale to the nearest e4m3 value, one block and one element at a time."""
    rows, columns = (math.ceil(size / BLOCK) for size in weight.shape)
    scales, distance = np.zeros((rows, columns)), np.zeros(weight.shape)
    for row in range(rows):
        for column in range(columns):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = max(np.abs(block).max(), 1e-12) / 448
            for (i, j), element in np.ndenumerate(block):
                nearest = np.abs(VALUES - element / scales[row, column]).min()
                distance[row * BLOCK + i, column * BLOCK + j] = nearest
    return scales, distance


@settings(max_examples=25)
@given(
    rows=st.integers(1, 2 * BLOCK + 3),
    columns=st.integers(1, BLOCK + 5),
    kind=st.tuples(st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 3e4]), st.sampled_from([torch.bfloat16, torch.float32])),
    at_once=st.sampled_from([BLOCK, block_fp8.ROWS_AT_ONCE]),
    seed=st.integers(0, 1000),
)
@example(rows=2 * BLOCK + 3, columns=5, kind=(0.02, torch.bfloat16), at_once=BLOCK, seed=0)
def test_every_element_is_the_nearest_that_the_scale_of_its_block_allows(rows, columns, kind, at_once, seed):
    magnitude, dtype = kind
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * magnitude).to(dtype)
    weight[0, 0] = 0.0
    before, block_fp8.ROWS_AT_ONCE = block_fp8.ROWS_AT_ONCE, at_once
    try:
        values, scales = quantise(weight)
    finally:
        block_fp8.ROWS_AT_ONCE = before
    exact = weight.double().numpy()
    expected, nearest = slow(exact)
    np.testing.assert_allclose(scales.numpy(), expected, rtol=1e-6)
    spread = np.kron(expected, np.ones((BLOCK, BLOCK)))[:rows, :columns]
    missed = np.abs(values.double().numpy() - exact / spread)
    assert (missed <= nearest + 1e-6 * np.abs(exact / spread) + 1e-6).all()  # division in float32


@settings(max_examples=50)
@given(
    rows=st.integers(1, 3 * BLOCK),
    columns=st.integers(1, 3 * BLOCK),
    power=st.integers(-20, 10),
    seed=st.integers(0, 99),
)
def test_what_comes_back_is_within_a_sixteenth_or_half_of_the_smallest_step(rows, columns, power, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**power
    values, scales = quantise(weight)
    back = dequantise(values, scales)
    step = block_fp8.of_elements(scales, weight.shape) * 2.0**-10
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, step) * (1 + 1e-5)).all()
    assert torch.equal(torch.isfinite(back), torch.ones_like(back, dtype=torch.bool))
    again, scales_again = quantise(back)  # the largest of a block is 448 of its scale: nothing moves any more
    torch.testing.assert_close(dequantise(again, scales_again), back, rtol=1e-6, atol=0)


def test_a_block_of_zeros_stays_zero_and_what_is_not_finite_is_not_hidden():
    weight = torch.zeros(BLOCK + 1, BLOCK)
    weight[BLOCK, 3] = math.nan
    values, scales = quantise(weight)
    back = dequantise(values, scales)
    assert (back[:BLOCK] == 0).all()
    assert scales[0, 0] > 0
    assert back[BLOCK].isnan().all()
    values, scales = quantise(torch.tensor([[math.inf, 1.0]]))
    assert not dequantise(values, scales).isfinite().any()


def test_a_large_element_costs_its_own_block_alone():
    weight = torch.full((2 * BLOCK, 2 * BLOCK), 0.01)
    weight[0, 0] = 1000.0
    values, scales = quantise(weight)
    back = dequantise(values, scales)
    assert (back[BLOCK:] - 0.01).abs().max() < 1e-6
    assert (back[:BLOCK, BLOCK:] - 0.01).abs().max() < 1e-6
    assert (back[:BLOCK, :BLOCK] - weight[:BLOCK, :BLOCK]).abs()[1:].max() > 1e-4
    assert scales[0, 0] > 1e4 * scales[1, 1]


@pytest.mark.parametrize("columns", [1, BLOCK, BLOCK + 7])
def test_activations_are_rounded_in_groups_of_one_row(columns):
    rows = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    rows[1] *= 1000
    found = quantise_activations(rows)
    for row, rounded in zip(rows, found, strict=True):
        for start in range(0, columns, BLOCK):
            values, scales = quantise(row[None, start : start + BLOCK])
            assert torch.equal(dequantise(values, scales)[0], rounded[start : start + BLOCK])
