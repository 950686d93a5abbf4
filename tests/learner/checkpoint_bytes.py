"""Bytes of tensors in each file of a checkpoint, as its index has them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader


def bytes_of_files(folder: Path) -> Counter[str]:
    """By the name of the file. Raises what torch raises for a folder that is no checkpoint."""
    index, sizes = FileSystemReader(folder).read_metadata(), Counter()
    for key, where in index.storage_data.items():
        tensor = index.state_dict_metadata[key.fqn]
        if hasattr(tensor, "chunks"):
            (chunk,) = (chunk for chunk in tensor.chunks if chunk.offsets == key.offset)
            sizes[where.relative_path] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return sizes
