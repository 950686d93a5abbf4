"""A copy of a run whose journal says something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from streamrl.config.replay import JournalConfig
from streamrl.replay.journal import Journal, read_journal
from streamrl.replay.records import Completed
from streamrl.replay.segments import Opening, load_frames


def copy_with_journal(run_folder: Path, target: Path, change: Callable[..., tuple]) -> Path:
    """A copy of a run whose journal was written again, each record and its frames as `change` gives them."""
    copy = target / "run"
    shutil.copytree(run_folder, copy, ignore=shutil.ignore_patterns("journal"))
    journal = Journal(copy / "journal", JournalConfig(), snapshot=b"")
    for entry in read_journal(run_folder / "journal"):
        if isinstance(entry.record, Opening):
            continue
        frames = load_frames(run_folder / "journal", entry.place) if entry.frame_bytes else ()
        record, frames = change(entry.record, frames)
        if isinstance(record, Completed):
            journal.append_group(record, frames)
        else:
            journal.append(record)
    journal.commit()
    journal.close()
    return copy
