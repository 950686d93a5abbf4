"""Whether this machine has a CUDA device, found without importing torch (the worker never does)."""

from __future__ import annotations

import os
from pathlib import Path


def has_cuda() -> bool:
    """True where an NVIDIA device is visible: a device node, and CUDA_VISIBLE_DEVICES does not hide all."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))
