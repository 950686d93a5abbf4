"""A version of the weights as a Hugging Face folder: written whole or not at all, checked by its checksum.

torch is imported where tensors are: the worker only compares checksums, and has none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from streamrl.publish.staging import Staged

WEIGHTS = "model.safetensors"

COPIED = (".json", ".jinja", ".txt", ".model")  # what goes with the weights: configuration, tokenizer, chat template


def write_model(folder: Path, staged: Staged, model: Path) -> None:
    """Write `staged` with the files of `model` that go with it, in place of what was there.

    Raises OSError or SafetensorError, and leaves `folder` as it was.
    """
    from safetensors.torch import save_file

    draft = _draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for file in model.iterdir():
            if file.is_file() and file.suffix in COPIED and not _is_weight_index(file):
                shutil.copy(file, draft / file.name)
        metadata = {"format": "pt", "version": str(staged.version)}
        save_file(dict(staged.tensors()), draft / WEIGHTS, metadata=metadata)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _draft_of(folder: Path) -> Path:
    """Where `folder` is written before it has its name."""
    return folder.with_name(f".{folder.name}.{os.getpid()}")


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
