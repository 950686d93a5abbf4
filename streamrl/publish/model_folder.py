"""A version of the weights as a Hugging Face folder: written whole or not at all, checked by its checksum.

torch is imported where tensors are: the worker only compares checksums, and has none.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from streamrl.whole_files import drafted_folder

if TYPE_CHECKING:
    from streamrl.publish.staging import Staged

WEIGHTS = "model.safetensors"

COPIED = (".json", ".jinja", ".txt", ".model")  # what goes with the weights: configuration, tokenizer, chat template


def write_model(folder: Path, staged: Staged, model: Path) -> None:
    """Write `staged` with the files of `model` that go with it, in place of what was there.

    Raises OSError or SafetensorError, and leaves `folder` as it was.
    """
    from safetensors.torch import save_file

    with drafted_folder(folder) as draft:
        for file in model.iterdir():
            if file.is_file() and file.suffix in COPIED and not _is_weight_index(file):
                shutil.copy(file, draft / file.name)
        metadata = {"format": "pt", "version": str(staged.version)}
        save_file(dict(staged.tensors()), draft / WEIGHTS, metadata=metadata)


def checksum(file: Path) -> str:
    """xxh3_64 of a file, hexadecimal. Raises OSError where it cannot be read."""
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_weight_index(file: Path) -> bool:
    """The index of a sharded checkpoint, which would point at files that the folder does not have."""
    return file.name.endswith(".index.json")
