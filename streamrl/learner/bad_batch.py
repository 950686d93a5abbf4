"""A batch as a file: what the learner trained when it ended for want of updates, to be looked at afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from streamrl.stream.codec import decode_group, encode_group
from streamrl.types import Batch

FORMAT = 1


class _File(msgspec.Struct, frozen=True):
    """Groups as they travel on the wire: two frames each."""

    format: int
    step: int
    frames: list[bytes]


def save(batch: Batch, run_folder: Path) -> Path:
    """Write RUN/bad_batch_STEP.bin, whole or not at all. Returns its path."""
    path = run_folder / f"bad_batch_{batch.step}.bin"
    frames = [bytes(frame) for group in batch.groups for frame in encode_group(group, max_message=sys.maxsize)]
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(msgspec.msgpack.encode(_File(FORMAT, batch.step, frames)))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return path


def load(path: Path) -> Batch:
    """The batch of a file that `save` wrote. Raises ValueError for another file."""
    file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    if file.format != FORMAT:
        raise ValueError(f"{path} has format {file.format}, this streamrl reads {FORMAT}")
    pairs = zip(file.frames[::2], file.frames[1::2], strict=True)
    return Batch(step=file.step, groups=tuple(decode_group(*pair) for pair in pairs))
