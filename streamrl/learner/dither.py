"""Master weights that begin anywhere within what rounds to the saved weight, and not all in its middle.

A pass computes with bfloat16 weights, the optimizer moves float32 masters, and a weight follows its master by whole
rounding steps. Masters that are copied from a file in bfloat16 all begin in the middle of such a step:

    copied    ├────────x────────┤   no weight moves until the changes of its master add up to half a step
    dithered  ├──x──────────────┤   a change of a tenth of a step moves a tenth of the weights, at once

The step of a weight of 0.02 is 1.2e-4, and Adam moves a master by about the learning rate: at 1e-5 copied masters give
six updates nearly nothing, dithered ones give each update its share. The weights of step 0 are the file's, bit for bit.

Where a master begins depends on its value alone. So all ranks that hold it agree, in any layout, and a run that is
started again begins alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 65536 over the golden ratio: neighbouring values, whose bits count up, are spread evenly.
_GOLDEN = 40503

_PLACES = 4096  # few enough for a float32 to tell them from the edges of a step

_AT_ONCE = 1 << 22  # values of a contiguous tensor, which bounds the memory that it takes


@torch.no_grad()
def dither(master: Tensor) -> None:
    """Move each value by less than half a rounding step of bfloat16, in place; it rounds to what it did.

    master: float32, of any shape and strides. Values that are no bfloat16 ones, as weights in FP8 may be, are known
    better, and stay; so do 0 and infinities.

    >>> weights = torch.tensor([0.02, 0.5, 0.0]).bfloat16()
    >>> dither(masters := weights.float())
    >>> bool((masters.bfloat16() == weights).all()), (masters != weights.float()).tolist()
    (True, [True, True, False])
    """
    for part in master.view(-1).split(_AT_ONCE) if master.is_contiguous() else (master,):
        part.copy_(_dithered(part))


def _dithered(master: Tensor) -> Tensor:
    saved = master.bfloat16()
    bits = saved.view(torch.int16)
    place = (bits.int() * _GOLDEN & 0xFFFF) * _PLACES // 65536
    offset = (place + 0.5) / _PLACES - 0.5  # of a step; above 0: away from zero
    neighbour = (bits + (offset > 0).short() * 2 - 1).view(torch.bfloat16)
    step = (neighbour.float() - saved.float()).abs()
    moved = master + offset * step * saved.sign().float()
    stays = (saved.float() != master) | (saved == 0) | (moved.bfloat16() != saved)
    return torch.where(stays, master, moved)
