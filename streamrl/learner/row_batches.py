"""The batches of `streamrl sft`: which rows a step trains is a function of seed and step alone.

    step ──▶ indices step x batch, ... ──item_at──▶ rows, each once an epoch, in an order of the epoch's own ──▶ Batch

So a resume at any step trains the rows that an uninterrupted run would have trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from streamrl.config import Config
from streamrl.learner.batches import Delivery, LocalBatches
from streamrl.learner.token_rows import HELD_OUT, ROWS, TRAINED, TokenRows
from streamrl.tasks.order import item_at
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

TASK = "rows"  # of the groups: each is one row


class RowBatches(LocalBatches):
    """Batches from the rows of a run folder."""

    def __init__(self, config: Config, run_folder: Path) -> None:
        self._rows = TokenRows(run_folder / ROWS / TRAINED)
        self._size = config.sft.batch
        self._seed = config.run.seed

    def next(self, step: int, timeout: float) -> Delivery:
        """The rows of a step, at once."""
        indices = range(step * self._size, (step + 1) * self._size)
        rows = [item_at(index, len(self._rows), self._seed) for index in indices]
        epochs = (step + 1) * self._size / len(self._rows)
        return Delivery("batch", _batch(self._rows, rows, step, indices[0]), {"rows/epoch": epochs})


def held_out(run_folder: Path) -> Batch | None:
    """All held-out rows of a run as one batch; None where it holds none out."""
    folder = run_folder / ROWS / HELD_OUT
    if not folder.exists():
        return None
    rows = TokenRows(folder)
    return _batch(rows, range(len(rows)), step=0, first=0)


def _batch(rows: TokenRows, places: Iterable[int], step: int, first: int) -> Batch:
    """A group of one sample for each row. `first`: the id of the first group."""
    groups = tuple(
        Group(group_id=first + number, task=TASK, prompt_index=place, samples=(_sample(*rows[place], step),))
        for number, place in enumerate(places)
    )
    return Batch(step=step, groups=groups)


def _sample(ids: np.ndarray, trained: np.ndarray, step: int) -> Sample:
    """The row as an answer to the tokens before the first trained one, of no age. Its log-probs are read by nobody."""
    first = int(np.argmax(trained))
    length = len(ids) - first
    return Sample(
        prompt_ids=ids[:first],
        output_ids=ids[first:],
        logprobs=np.zeros(length, np.float32),
        loss_mask=trained[first:],
        spans=(VersionSpan(PolicyVersion(step), 0, length),),
        reward=0.0,
    )
