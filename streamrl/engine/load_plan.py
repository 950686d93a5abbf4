"""What is said between a worker and the loader inside its SGLang server: what to load, and what became of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.engine.kept_memory import Place

# What SGLang's `--custom-weight-loader` and `load_format` name; the server must be able to import streamrl.
LOADER = "streamrl.engine.memory_loader.load"

RECEIPT_BYTES = 4096  # of one rank

REASON = 600  # characters of a reason: JSON may take six bytes for each


class BucketLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that lie one behind the other in one run of bytes.

    Example: `BucketLayout(names=("norm.weight",), dtypes=("float32",), shapes=((64,),), bytes=256, checksum="9a...")`.
    """

    names: tuple[str, ...]  # Hugging Face names
    dtypes: tuple[str, ...]  # torch's names without "torch."
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    checksum: str = ""  # xxh3_64 of the bytes, hexadecimal; empty: nobody compares it


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One version for one rank of a server."""

    place: Place  # where the buckets lie
    buckets: tuple[BucketLayout, ...]
    verify: bool  # compare every bucket's checksum before any weight is touched
    receipt: str  # path of a file of the worker's
    token: str = ""  # of this try; its receipts begin with it
    rank: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the loader did. `stale` and `refused`: nothing was touched; `failed`: some weights may be loaded."""

    status: Literal["loaded", "stale", "refused", "failed"]
    reason: str = ""


def write_receipt(plan: LoadPlan, receipt: Receipt) -> None:
    """Into the slot of the plan's rank. Raises OSError where the worker has gone."""
    line = " ".join(receipt.reason.split()).encode("ascii", "replace").decode()
    text = msgspec.json.encode(msgspec.structs.replace(receipt, reason=line[:REASON]))
    file = os.open(plan.receipt, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, (plan.token.encode() + text).ljust(RECEIPT_BYTES, b"\0"), plan.rank * RECEIPT_BYTES)
    finally:
        os.close(file)


class Receipts:
    """The receipts of one try, one a rank, in memory of this process. `close` it.

    A new one for each try. What a former one comes to later is no news: its path may be that of a new one by then, its
    token is not.
    """

    def __init__(self, ranks: int) -> None:
        self._file = os.memfd_create("streamrl-receipts", os.MFD_CLOEXEC)
        self._ranks = ranks
        self.token = secrets.token_hex(8)
        self.path = str(Path("/proc") / str(os.getpid()) / "fd" / str(self._file))

    def read(self) -> Iterator[Receipt | None]:
        """The receipt of each rank, in order; None for a rank that has written none."""
        for rank in range(self._ranks):
            token, text = self.token.encode(), os.pread(self._file, RECEIPT_BYTES, rank * RECEIPT_BYTES)
            is_ours = text.startswith(token)
            yield msgspec.json.decode(text[len(token) :].rstrip(b"\0"), type=Receipt) if is_ours else None

    def close(self) -> None:
        os.close(self._file)
