"""A run that makes no step: what the service sees of the reason, and how its workers learn that there are steps.

Pure, like the buffer: messages and times come in as arguments.
"""

from __future__ import annotations

from streamrl.replay.delivery import Delivery
from streamrl.replay.device_sharing import DeviceSharing, Owner
from streamrl.replay.peers import Peers
from streamrl.replay.workers import Workers
from streamrl.stream.messages import Progress
from streamrl.types import PolicyVersion

# Share of run.progress_timeout after which a worker is sent a step at the latest: it then gives the run up a little
# later than the service, never before it, and a run of fast steps costs no message for each.
LATEST = 0.1


class Herald:
    """What is sent to the workers of the learner's steps."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: run.progress_timeout, in seconds."""
        self._period = LATEST * timeout
        self._untold: Progress | None = None
        self._told_at: float | None = None
        self._incarnation = -1

    def is_new_life(self, version: PolicyVersion) -> bool:
        """Does this learner, who says Hello, come from another start than the one before?"""
        former, self._incarnation = self._incarnation, version.incarnation
        return former != version.incarnation

    def step(self, progress: Progress) -> None:
        """The learner has made a step."""
        self._untold = Progress(version=progress.version)  # the signals are the service's

    def due(self, now: float) -> Progress | None:
        """The newest step, when it is time to tell of it."""
        if self._told_at is None:
            self._told_at = now
        if self._untold is None or now - self._told_at < self._period:
            return None
        progress, self._untold, self._told_at = self._untold, None, now
        return progress


def why_no_step(
    workers: Workers, peers: Peers, delivery: Delivery, sharing: DeviceSharing | None, *, full: bool
) -> str:
    """What keeps the learner from its next step; `full`: the disk has no room for the journal."""
    lost = len(workers.known) - len(workers.live)
    if full:
        return "the disk of the run folder is full"
    if peers.learner is None:
        return "no learner is there"
    if not workers.live:
        return f"no generator worker is there{f', {lost} are silent' if lost else ''}"
    if delivery.asked is None:
        return "the learner is at its step, and does not end it"
    if sharing is not None and sharing.owner is Owner.HANDOVER:
        awake = sum(worker.asleep != sharing.number for worker in workers.live)
        return f"the servers of {awake} generator workers do not fall asleep"
    return f"step {delivery.asked} has not all of its groups from {len(workers.live)} generator workers"
