"""Megatron-Core on a machine without CUDA's driver, such as a login node with the packages of a GPU node.

Megatron imports what it may use, and takes an ImportError for an answer. A package that loads the driver when it is
imported raises an OSError, which would end every command that needs Megatron.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import Any

DRIVER = "libcuda.so.1"

NEED_DRIVER = ("flash_mla",)  # what Megatron imports so, and does without


def hide() -> None:
    """Have what needs the driver raise an ImportError where there is none. Call it before Megatron is imported."""
    found = [name for name in NEED_DRIVER if name not in sys.modules and importlib.util.find_spec(name) is not None]
    if found and not _has_driver():
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(found))  # None marks what cannot be imported


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
