"""`streamrl doctor`: what is installed, which accelerators there are, and which paths a run would take."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata

import zmq

from streamrl import __version__, device
from streamrl.config_file import ConfigError
from streamrl.engine import stand_ins
from streamrl.learner import model

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine", "pyzmq", "msgspec", "uvloop")


def main() -> int:
    """Print the findings. Returns 1 when something that every run needs is missing."""
    print(f"streamrl {__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores")
    missing = []
    for name in PACKAGES:
        try:
            print(f"  {name:<20} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            optional = name == "transformer-engine"
            print(f"  {name:<20} not installed{' (CUDA only)' if optional else ''}")
            if not optional:
                missing.append(name)
    print(f"  {'libzmq':<20} {zmq.zmq_version()}")
    return 1 if missing else 0
