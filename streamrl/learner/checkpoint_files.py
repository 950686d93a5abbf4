"""The checksums of a checkpoint's files: taken while they are written, compared before anything is read from them.

A rank's file of weights and moments is summed on its way to the disk, so that the largest files are not read again
for it; the small ones, and an export, are read once. At a resume every rank reads its share of the files.

The checksum is XXH3-64, as in the journal. It is no protection against intent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

Content = bytes | memoryview

_PIECE = 8 << 20  # bytes that are read at once: far more than a disk needs to be read at its full speed


class FileSum(msgspec.Struct, frozen=True):
    """What a file must be."""

    size: int  # bytes
    xxh3: str  # XXH3-64, hexadecimal


class SummedWriting(_StorageWriterTransforms):
    """Megatron's way of a tensor into a file, with a checksum of all that takes it.

    Usage:
        writing = SummedWriting(writer.transforms)  # one for each file
        ...  # the file is written through it
        writing.sum  # FileSum(size=31204, xxh3='4c2a1f0e9b7d5a63')
    """

    def __init__(self, former: _StorageWriterTransforms) -> None:
        super().__init__(former.extensions)
        self._hash = xxhash.xxh3_64()
        self._size = 0

    @property
    def sum(self) -> FileSum:
        """Size and checksum of what has been written so far."""
        return FileSum(self._size, self._hash.hexdigest())

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[IO[bytes], list[str]]:
        """torch's own, behind a stream that notes what passes."""
        return super().transform_save_stream(write_item, cast(Any, _Noting(raw_stream, self._record)))

    def _record(self, written: Content) -> None:
        self._hash.update(written)
        self._size += memoryview(written).nbytes


class _Noting:
    """The two calls that torch makes on the stream of a file."""

    def __init__(self, raw: IO[bytes], record: Callable[[Content], None]) -> None:
        self._raw, self._record = raw, record

    def write(self, content: Content) -> int:
        self._record(content)
        return self._raw.write(content)

    def flush(self) -> None:
        self._raw.flush()


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file as it is on the disk. Raises OSError."""
    checksum, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            checksum.update(piece)
            size += len(piece)
    return FileSum(size, checksum.hexdigest())


def files_of(folder: Path) -> list[str]:
    """The files of a checkpoint, those of its subfolders included, by their paths in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damage(folder: Path, sums: dict[str, FileSum], names: Iterable[str]) -> dict[str, str]:
    """What is wrong with these files of `folder`, by name; nothing where they are what `sums` says."""
    found = {name: _difference(folder / name, sums[name]) for name in names}
    return {name: difference for name, difference in found.items() if difference is not None}


def _difference(path: Path, expected: FileSum) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"has {size} bytes of {expected.size}"
        return None if sum_of(path) == expected else "does not match its checksum"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
