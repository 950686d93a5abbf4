"""Copies in the host's memory of what is on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, pinned where it comes from a GPU."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
