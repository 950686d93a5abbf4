"""A batch as a file, to be looked at: what was trained without an update, and groups that could not be trained."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from streamrl.stream.codec import decode_group, encode_group
from streamrl.types import Batch
from streamrl.whole_files import write_whole

FORMAT = 1


class _File(msgspec.Struct, frozen=True):
    """Groups as they travel on the wire: two frames each."""

    format: int
    step: int
    frames: list[bytes]


def save(batch: Batch, path: Path) -> Path:
    """Write `path`, whole or not at all. Returns it."""
    frames = [bytes(frame) for group in batch.groups for frame in encode_group(group, max_message=sys.maxsize)]
    write_whole(path, msgspec.msgpack.encode(_File(FORMAT, batch.step, frames)), durable=True)
    return path


def load(path: Path) -> Batch:
    """The batch of a file that `save` wrote. Raises ValueError for another file."""
    file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    if file.format != FORMAT:
        raise ValueError(f"{path} has format {file.format}, this streamrl reads {FORMAT}")
    pairs = zip(file.frames[::2], file.frames[1::2], strict=True)
    return Batch(step=file.step, groups=tuple(decode_group(*pair) for pair in pairs))
