"""Which groups a rank was training when it failed, left in a file for the learner that is started again.

    a rank fails in a micro batch ──▶ RUN/quarantine/blame_STEP_RANK.json, all ranks end
    started again, rank 0 reads    ──▶ one group is named: it is quarantined
                                   ──▶ several: each is rehearsed in a row of its own, and a failure names it alone

Only what data alone can bring about is blamed on it (`DATA_ERRORS`). A lost peer, a full device memory and
whatever else a RuntimeError may be would fail with any other groups too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.whole_files import write_whole

DATA_ERRORS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)

GroupKey = tuple[int, int]  # (group id, attempt)


class MicroBatchFailed(RuntimeError):
    """A pass over a micro batch failed for a reason that its data may be. The cause is the error itself."""

    def __init__(self, groups: tuple[GroupKey, ...], error: Exception) -> None:
        names = ", ".join(str(group_id) for group_id, _ in groups)
        super().__init__(f"a micro batch of group{'s' * (len(groups) > 1)} {names}: {type(error).__name__}: {error}")
        self.groups = groups


class Blame(msgspec.Struct, frozen=True):
    """The content of a file."""

    step: int
    groups: tuple[GroupKey, ...]
    reason: str


def folder_of(run_folder: Path) -> Path:
    return run_folder / "quarantine"


def blame(run_folder: Path, step: int, rank: int, failure: MicroBatchFailed) -> None:
    """Write the file of this rank, whole or not at all."""
    folder = folder_of(run_folder)
    folder.mkdir(exist_ok=True)
    blame = Blame(step, failure.groups, str(failure.__cause__))
    write_whole(folder / f"blame_{step}_{rank}.json", msgspec.json.encode(blame), durable=True)


class Blames:
    """What the ranks of a former learner have left, by step."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = folder_of(run_folder)

    def named(self, step: int) -> dict[GroupKey, str]:
        """The groups that failed alone, and those that could not be separated: (group id, attempt): why."""
        blames = list(self._of(step))
        named = {each.groups[0]: each.reason for each in blames if len(each.groups) == 1}
        if self._rehearsed(step).exists():
            for each in blames:
                if not named.keys() & set(each.groups):
                    named |= dict.fromkeys(each.groups, f"one of {len(each.groups)} groups: {each.reason}")
        return named

    def suspects(self, step: int) -> set[GroupKey]:
        """The groups that failed together, none of them named, before each was rehearsed alone."""
        if self._rehearsed(step).exists():
            return set()
        named = self.named(step)
        return {key for each in self._of(step) if not named.keys() & set(each.groups) for key in each.groups}

    def rehearsed(self, step: int) -> None:
        """Every suspect has passed alone; if they fail together again, nothing tells them apart."""
        for path in self._folder.glob(f"blame_{step}_*.json"):
            path.unlink()
        self._rehearsed(step).touch()

    def forget(self, step: int) -> None:
        """The step has been trained."""
        if self._folder.exists():
            for path in [*self._folder.glob(f"blame_{step}_*.json"), self._rehearsed(step)]:
                path.unlink(missing_ok=True)

    def _of(self, step: int) -> Iterator[Blame]:
        for path in sorted(self._folder.glob(f"blame_{step}_*.json")):
            yield msgspec.json.decode(path.read_bytes(), type=Blame)

    def _rehearsed(self, step: int) -> Path:
        return self._folder / f"rehearsed_{step}"
