"""What a peer, a ledger and a group must be to come in: of this run, possible, and trainable by the learner.

Of a group: as many rollouts as were asked for, of no more branches than are allowed, of known weights. What follows
from its ticket is the buffer's to ask (`replay/selection.py`, `mismatch`); that arrays, spans and numbers fit together,
the decoder's (`stream/codec.py`). Pure.
"""

from __future__ import annotations

from streamrl.replay.buffer import Buffer
from streamrl.stream.identity import RunIdentity
from streamrl.stream.messages import Hello
from streamrl.trainable import untrainable
from streamrl.types import Group, Ledger, PolicyVersion

LARGEST = 2**53  # of a prompt index: what a ticket can say


class Admission:
    """The checks at the door of the replay service.

    Usage:
        admission = Admission(group_size=8)
        admission.problem(group, buffer)  # "2 samples, generate.group_size=8"
    """

    def __init__(self, group_size: int, max_branches: int = 1) -> None:
        """`group_size`: rollouts of a group; `max_branches`: samples of one of them at most."""
        self._group_size = group_size
        self._max_branches = max_branches
        self._announced: PolicyVersion | None = None  # the newest that the publisher has announced

    def announce(self, version: PolicyVersion) -> None:
        """Servers may get this version from now on."""
        self._announced = version if self._announced is None else max(version, self._announced)

    def unknown(self, version: PolicyVersion, buffer: Buffer) -> bool:
        """Has no learner of this run announced this version?

        A server has new weights before it reports them, so that an announced version is known. A service that was
        started again learns of the newest by the publisher's Announce, and until then knows what its journal knows.
        """
        known = [each for each in (self._announced, buffer.acknowledged) if each is not None]
        incarnation = max((each.incarnation for each in (*known, buffer.began) if each is not None), default=0)
        return version > max(known, default=PolicyVersion(0)) or version.incarnation > incarnation

    def problem(self, group: Group, buffer: Buffer) -> str | None:
        """Why a group cannot come in; None where it can."""
        if group.size != self._group_size:
            what = "rollouts" if group.branches else "samples"
            return f"{group.size} {what}, generate.group_size={self._group_size}"
        if (most := max(group.branches, default=1)) > self._max_branches:
            return f"a rollout of {most} branches, task.max_branches={self._max_branches}"
        newest = max((sample.spans[-1].version for sample in group.samples if sample.spans), default=None)
        if newest is not None and self.unknown(newest, buffer):
            return f"tokens of version {newest}, which was never published"
        return untrainable(group, buffer.limits) if buffer.limits is not None else None


def foreign(hello: Hello, run: RunIdentity) -> str | None:
    """Why a peer may not take part in this run; None where it is of it."""
    if hello.run == run.id:
        return None
    return (
        f"{hello.name} is of run {hello.run}, and run {run.id} is served at this address; allowed: a replay.address "
        f"of its own for each run, or run.id={run.id} for a role of this run that does not share its folder"
    )


def impossible(ledger: Ledger, step: int, buffer: Buffer, run: RunIdentity) -> str | None:
    """Why weights of `step` cannot contain what this ledger says; None where they can.

    Every id from `below` on is either settled or out, and every step has settled its groups. So an id that is far
    beyond them is in no true ledger, and nothing has to be counted up to it to see that.
    """
    if ledger.run is not None and ledger.run != run.id:
        return f"its ledger is of run {ledger.run}, this is run {run.id}"
    known = sorted((*ledger.above, *ledger.pending))
    last = max((ledger.below - 1, *known))
    without_gap = not known or (known[0] == ledger.below and last - ledger.below + 1 == len(known) == len(set(known)))
    if not without_gap or not 0 <= ledger.below + len(ledger.above) <= buffer.order.first(step):
        return f"its ledger knows groups up to {last}, and {step} steps settle {buffer.order.first(step)} without a gap"
    if unknown := {task for task, _ in ledger.pending.values()} - buffer.tasks:
        return f"its ledger names the task {min(unknown)}, which this run does not have"
    indices = (*ledger.cursors.values(), *(index for _, index in ledger.pending.values()))
    if any(not 0 <= index <= LARGEST for index in indices):
        return "its ledger names a prompt index that is out of range"
    return None
