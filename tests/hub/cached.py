"""A repository in a cache of the hub, laid out as its library lays it out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

FIRST, SECOND = "a1" * 20, "b2" * 20  # commits


def cache(
    root: Path, name: str, files: Mapping[str, bytes], commit: str = FIRST, *, kind: str = "model", ref: str = "main"
) -> Path:
    """Write the files of a commit, and that `ref` is at it. Returns the snapshot's folder."""
    stored = root / f"{kind}s--{name.replace('/', '--')}"
    snapshot = stored / "snapshots" / commit
    for path, content in files.items():
        blob = stored / "blobs" / hashlib.sha1(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (stored / "refs").mkdir(exist_ok=True)
    (stored / "refs" / ref).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
