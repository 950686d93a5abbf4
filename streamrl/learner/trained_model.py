"""The trained model at the end of a run: RUN/model, written by the ranks that have its weights in memory.

    last checkpoint complete on disk ──▶ "model": every rank its part ──▶ RUN/model ──▶ the service is told of the end

A learner that is killed before the service is told of the end comes here again when it is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from streamrl.learner.trainer import Trainer
from streamrl.observe.ending import MODEL


class ExportError(RuntimeError):
    """The trained model could not be written; the text says why, and where its weights are."""


def write(trainer: Trainer, run_folder: Path, tick: float, report_saved: Callable[[], None]) -> None:
    """Rank 0 has every rank write RUN/model, behind the last checkpoint: that one comes first where a disk gets full.

    tick: seconds between two words to the ranks that wait. report_saved: called meanwhile; it raises CheckpointError
    where the checkpoint is not written. Raises ExportError.
    """
    while not trainer.settled(tick):
        trainer.broadcast("wait")
        report_saved()
    report_saved()
    trainer.broadcast("model")
    try:
        trainer.export_model()
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{run_folder / MODEL} cannot be written: {error}; the checkpoint of step {trainer.version.step} is whole, "
            "and the same command writes the model, or ends without it with checkpoint.export=false"
        ) from error
