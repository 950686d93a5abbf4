"""Which checkpoint a run resumes from: the newest that is whole and the run's own.

    newest ──description and every file match──▶ it
       └── damaged ──▶ the next older one ──▶ ... ──▶ it; the damaged ones are set aside as step_N.damaged
                                           └──▶ none is whole: nothing is touched, and the learner ends with one line

The steps behind an older checkpoint are delivered again, as after a kill; where the journal does not have them any
more, behind one that only `checkpoint.keep_every` keeps, their groups are generated again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.learner import checkpoint
from streamrl.learner.checkpoint import Checkpoint, CheckpointDamaged
from streamrl.learner.parallel import Ranks
from streamrl.stream.identity import RunIdentity
from streamrl.whole_files import sync

log = logging.getLogger(__name__)

# Suffix of a checkpoint that cannot be read: it is kept for inspection, and counts no more.
SET_ASIDE = ".damaged"

Report = Callable[[str], None]


def newest_whole(root: Path, ranks: Ranks, run: RunIdentity, report: Report = log.error) -> Checkpoint | None:
    """The checkpoint of `root` (RUN/checkpoints) to resume from; None when there is none at all. All ranks call.

    On rank 0 `report` receives a line for each thing that is damaged. Raises ConfigError on every rank where there are
    checkpoints and none is whole, and where the newest whole one is of another run or another format.
    """
    folders = ranks.broadcast(checkpoint.complete(root))
    reported: list[str] = []
    for tried, folder in enumerate(reversed(folders)):
        try:
            found = _read(folder, ranks, run)
            _verify(found, ranks, report)
        except CheckpointDamaged as error:
            reported.append(str(error))
            continue
        if ranks.rank == 0:
            for damaged, line in zip(reversed(folders[len(folders) - tried :]), reported, strict=True):
                report(f"{line}: {damaged.name} is set aside, training goes on from {folder.name}")
                _set_aside(damaged)
        ranks.barrier()
        return found
    if folders:
        raise ConfigError(
            f"{'; '.join(reported)}: no checkpoint is left to resume from; allowed: a copy of one put back, or a new "
            "run (--fresh)"
        )
    return None


def _read(folder: Path, ranks: Ranks, run: RunIdentity) -> Checkpoint:
    """Its description, as rank 0 finds it. Raises ConfigError on every rank."""
    found: Checkpoint | ConfigError | None = None
    if ranks.rank == 0:
        try:
            found = checkpoint.read(folder)
            run.check(folder, found.run)
        except ConfigError as error:
            found = error
    found = ranks.broadcast(found)
    if isinstance(found, ConfigError):
        raise found
    assert found is not None
    return found


def _verify(found: Checkpoint, ranks: Ranks, report: Report) -> None:
    """Raises CheckpointDamaged on every rank. A damaged export is reported, and no reason not to resume."""
    of_export = checkpoint.verify(found, ranks)
    if ranks.rank == 0:
        for line in of_export:
            report(f"{line}: it is part of an export, and training goes on")
        if not found.files:
            log.info("%s is from before checkpoints had checksums: it is read as it is", found.folder)


def _set_aside(folder: Path) -> None:
    target = folder.with_name(folder.name + SET_ASIDE)
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
    sync(folder.parent)
