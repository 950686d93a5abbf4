"""The rows of `streamrl sft` as tokens, in RUN/rows: written once before the run, read by its learner.

    RUN/rows/trained/, RUN/rows/held_out/    ids.bin int32 [N], trained.bin bool [N], ends.npy int64 [rows]

A resume reads them again, whatever has become of the data set.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROWS = "rows"  # in the run folder
TRAINED, HELD_OUT = "trained", "held_out"  # in that one


class TokenRows:
    """Rows of one split, memory-mapped.

    Example: `TokenRows(run_folder / ROWS / TRAINED)[0]` is (ids int32 [L], trained bool [L]): `trained` says which
    tokens enter the loss; the first one never does.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the folder has no rows."""
        self._ends: np.ndarray = np.load(folder / "ends.npy")
        self._ids = np.memmap(folder / "ids.bin", np.int32, "r")
        self._trained = np.memmap(folder / "trained.bin", np.bool_, "r")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        begin = int(self._ends[row - 1]) if row else 0
        end = int(self._ends[row])
        return np.array(self._ids[begin:end]), np.array(self._trained[begin:end])

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self._ends, prepend=0).max())


def write(folder: Path, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write rows, (ids int32 [L], trained bool [L]) each, into a new folder; without a row there is none."""
    ends: list[int] = []
    folder.mkdir(parents=True)
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "trained.bin").open("wb") as trained_file:
        for ids, trained in rows:
            ids_file.write(ids.astype(np.int32).tobytes())
            trained_file.write(trained.astype(np.bool_).tobytes())
            ends.append(len(ids) + (ends[-1] if ends else 0))
    np.save(folder / "ends.npy", np.array(ends, np.int64))
