"""Weights in FP8 by blocks of 128 x 128: e4m3 values, and a float32 scale a block.

    weight [N, K] ──amax of a block / 448──▶ scale [ceil(N/128), ceil(K/128)] ──weight / scale, rounded──▶ e4m3 [N, K]

What DeepSeek-V3 (arXiv:2412.19437, section 3.3) and SGLang's `fp8` with `weight_block_size` [128, 128] mean by it:
weight ~ e4m3 * scale of its block, which checkpoints call `weight_scale_inv`. torch is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128

LARGEST = 448.0  # of e4m3: what is above becomes NaN

# The smallest scale is this / 448: a block of zeros has one too. Trained weights are many orders of magnitude above.
LEAST_AMAX = 1e-12

ROWS_AT_ONCE = 32 * BLOCK  # of which a float32 copy is made: a whole matrix may be a gigabyte, beside a full GPU


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [N, K] and float32 scales [ceil(N/128), ceil(K/128)] of a weight [N, K], on its device.

    An element differs from what it was by at most 1/16 of itself, or by half of the smallest e4m3 step (2^-10) times
    the scale. What is not finite makes the scale of its block so, and stays visible.

    >>> import torch
    >>> values, scales = quantise(torch.tensor([[896.0, -2.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -1.0]], [[2.0]])
    """
    import torch

    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = weight[start : start + ROWS_AT_ONCE].float()
        first, last = start // BLOCK, -(-(start + part.shape[0]) // BLOCK)
        scales[first:last] = _largest_of_blocks(part).clamp(min=LEAST_AMAX) / LARGEST
        scaled = part / of_elements(scales[first:last], part.shape)
        values[start : start + part.shape[0]] = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [N, K]: what quantised weights represent."""
    return values.float() * of_elements(scales, values.shape)


def of_elements(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of every element of a matrix of this shape: [N, K] of block scales."""
    spread = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return spread.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantise_activations(rows: Tensor) -> Tensor:
    """`rows` [T, K] as the kernels see them: in groups of 128 of one row, rounded to e4m3, as float32 [T, K]."""
    import torch

    groups = -(-rows.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(rows.float(), (0, groups * BLOCK - rows.shape[1])).view(-1, groups, BLOCK)
    scale = padded.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / LARGEST
    rounded = (padded / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
    return rounded.view(rows.shape[0], -1)[:, : rows.shape[1]]


def _largest_of_blocks(part: Tensor) -> Tensor:
    import torch

    rows, columns = (-(-size // BLOCK) for size in part.shape)
    pads = (0, columns * BLOCK - part.shape[1], 0, rows * BLOCK - part.shape[0])
    padded = torch.nn.functional.pad(part.abs(), pads)
    return padded.view(rows, BLOCK, columns, BLOCK).amax((1, 3))
