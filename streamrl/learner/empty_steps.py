"""Steps that train nothing: a run of nothing but failures must not end as if it had trained.

step ──a trained token?──▶ yes: go on    no: what became of its samples is counted; too many in a row end the run
last step ──▶ a run that never trained a token has failed
"""

from __future__ import annotations

from collections import Counter

from streamrl.types import Batch, Sample


class EmptySteps:
    """What is known of the steps without a trained token.

    Usage:
        empty = EmptySteps(limit=8)
        empty.add(batch)
        empty.verdict(complete=False)
        # '8 steps in a row trained no token (learner.empty_steps: 8): of 256 samples 256 failed (too_long)'
    """

    def __init__(self, limit: int, trained: int = 0) -> None:
        """`limit`: such steps in a row after which the run is given up; 0: never.

        `trained`: tokens that former starts of the run have trained.
        """
        self._limit = limit
        self._trained = trained
        self._in_a_row = 0
        self._fates: Counter[str] = Counter()  # of the samples of the empty steps in a row

    def add(self, batch: Batch) -> None:
        """A step was trained on this batch."""
        tokens = sum(group.trained_tokens for group in batch.groups)
        self._trained += tokens
        if tokens:
            self._in_a_row = 0
            self._fates.clear()
            return
        self._in_a_row += 1
        for group in batch.groups:
            quarantined = group.group_id in batch.quarantined
            self._fates.update(_fate(sample, quarantined) for sample in group.samples)

    def verdict(self, *, complete: bool) -> str | None:
        """Why the run has failed, in one line; None where it has not. `complete`: its last step is done."""
        if self._limit and self._in_a_row >= self._limit:
            steps = f"{self._in_a_row} steps in a row trained no token (learner.empty_steps: {self._limit})"
        elif complete and not self._trained:
            steps = "the run has done all of its steps and trained no token"
        else:
            return None
        parts = ", ".join(f"{count} {fate}" for fate, count in self._fates.most_common())
        return f"{steps}: of {self._fates.total()} samples {parts}" if parts else steps


def _fate(sample: Sample, quarantined: bool) -> str:
    """What became of a sample without a trained token."""
    if quarantined:
        return "could not be trained (quarantined)"
    if sample.is_placeholder:
        return f"failed ({sample.failure or 'placeholders'})"
    if not len(sample.output_ids):
        return "were empty"
    return f"ended with {sample.finish_reason} and have no token that is trained"
