"""What a group must be to come in: as many samples as were asked for, of known weights, and trainable by the learner.

What follows from the ticket is the buffer's to ask (`replay/selection.py`, `mismatch`); that arrays, spans and numbers
fit together, the decoder's (`stream/codec.py`). Pure.
"""

from __future__ import annotations

from streamrl.replay.buffer import Buffer
from streamrl.trainable import untrainable
from streamrl.types import Group, PolicyVersion


class Admission:
    """The checks at the door of the replay service.

    >>> admission = Admission(group_size=8)
    >>> admission.problem(group, buffer)
    "2 samples, generate.group_size=8"
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._announced: PolicyVersion | None = None  # the newest that the publisher has told of

    def announce(self, version: PolicyVersion) -> None:
        """Servers may get this version from now on."""
        self._announced = version if self._announced is None else max(version, self._announced)

    def problem(self, group: Group, buffer: Buffer) -> str | None:
        """Why a group cannot come in; None where it can."""
        if len(group.samples) != self._group_size:
            return f"{len(group.samples)} samples, generate.group_size={self._group_size}"
        if (unknown := self._unknown_version(group, buffer)) is not None:
            return f"tokens of version {unknown}, which was never published"
        return untrainable(group, buffer.limits) if buffer.limits is not None else None

    def _unknown_version(self, group: Group, buffer: Buffer) -> PolicyVersion | None:
        """A server reports new weights after it has them, so that its first tokens may come before its report."""
        known = max((version for version in (self._announced, buffer.acknowledged) if version), default=None)
        newest = max((sample.spans[-1].version for sample in group.samples if sample.spans), default=None)
        return newest if newest is not None and (known is None or newest > known) else None
