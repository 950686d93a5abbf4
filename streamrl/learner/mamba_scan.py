"""The scan of Mamba-2 (arXiv 2405.21060): each head has a state that forgets at a rate of its own.

    S = exp(rate step) S + step x b^T;   y = S c

By chunks (section 6 there): within one, a token reads by a masked product what others wrote; from one to the next the
state alone is carried. On a GPU where mamba_ssm is installed its kernel computes the same; it has never been run here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from streamrl.learner.mamba_shape import CHUNK

log = logging.getLogger(__name__)

KERNEL_CHUNK = 256  # tokens that the kernel takes at once, as Mamba-2 has it


def scan(  # noqa: PLR0917 (as in the formula)
    value: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """value (x) [n, t, h, p], step (at least 0) [n, t, h], rate (below 0) [h], write (b) and read (c) [n, t, g, s] of
    groups of heads, state [n, h, p, s] (None: zeros), float32 -> outputs [n, t, h, p], the state behind the last token.

    A token of step 0 leaves the state as it is: such are pads.
    """
    if value.is_cuda and (kernel := _kernel()) is not None:
        return by_kernel(kernel, value, step, rate, write, read, state)
    return by_chunks(value, step, rate, write, read, state)


def by_chunks(  # noqa: PLR0917
    value: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`scan` by torch alone."""
    tokens, groups = value.size(1), write.size(2)
    chunk = min(CHUNK, tokens)
    # n, groups, heads of one, chunks, tokens of one, and what else there is
    value = _chunks(value * step.unsqueeze(-1), chunk).unflatten(1, (groups, -1))
    decay = _chunks((rate * step).unsqueeze(-1), chunk).unflatten(1, (groups, -1))
    write, read = (_chunks(x, chunk) for x in (write, read))  # of a group, for all of its heads
    sizes = value.size(2), value.size(-1)  # heads of a group, width
    # [.., q, k]: what decays between a token and a later one, summed for each pair by itself: a difference of two sums
    # from the beginning would lose what is small beside them.
    between = decay.expand(*decay.shape[:-1], chunk).tril(-1).cumsum(-2)
    outputs = ((read @ write.transpose(-1, -2)).unsqueeze(2) * between.exp().tril()) @ value
    behind = value * between[..., -1, :].exp().unsqueeze(-1)  # what is left of each token behind the last one
    written = (behind.permute(0, 1, 3, 2, 5, 4).flatten(3, 4) @ write).unflatten(3, sizes)
    total = decay.cumsum(-2)  # from the beginning of a chunk
    kept = total[..., -1:, :].exp()
    if state is None:
        state = value.new_zeros(len(value), groups * sizes[0], sizes[1], write.size(-1))
    state = state.unflatten(1, (groups, -1))
    before = []
    for place in range(value.size(3)):
        before.append(state)
        state = kept[:, :, :, place] * state + written[:, :, place]
    carried = read @ torch.stack(before, 2).flatten(3, 4).transpose(-1, -2)
    outputs = outputs + carried.unflatten(-1, sizes).permute(0, 1, 4, 2, 3, 5) * total.exp()
    outputs = outputs.flatten(1, 2).flatten(2, 3)[:, :, :tokens]
    return outputs.transpose(1, 2), state.flatten(1, 2)


def by_kernel(  # noqa: PLR0917
    kernel: Callable[..., Any],
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`scan` by mamba_ssm's `mamba_chunk_scan_combined`."""
    outputs, state = kernel(
        value.contiguous(),
        step.contiguous(),
        rate,
        write.contiguous(),
        read.contiguous(),
        chunk_size=KERNEL_CHUNK,
        initial_states=state,
        return_final_states=True,
    )
    return outputs, state


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        log.info("Mamba-2 layers: the scan is torch's, mamba_ssm is not there (%s)", error)
        return None
    log.info("Mamba-2 layers: the scan is mamba_ssm's kernel")
    kernel: Callable[..., Any] = mamba_chunk_scan_combined
    return kernel


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[n, t, h, d] -> [n, h, chunks, chunk, d], zeros behind the last token."""
    x = pad(x, (0, 0, 0, 0, 0, -x.size(1) % chunk))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))
