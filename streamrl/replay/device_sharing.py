"""Who has the devices of a run whose learner and servers take turns on them (`run.placement: shared`).

The servers generate while the learner waits for a batch. Once that is complete they are put to sleep, and the learner
gets it when all of them are asleep: it trains and publishes alone. A service that was started again knows of no batch,
so that the devices are the learner's until it asks for one.

No I/O and no clock: the sides of the service (`replay/core.py`) report what the learner waits for, and send `word`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from streamrl.machine import Machine
from streamrl.replay.workers import Worker
from streamrl.stream.messages import Sleep, Wake


class Owner(Enum):
    LEARNER = auto()  # it trains and publishes; every server sleeps
    SERVERS = auto()  # they generate what the learner waits for
    HANDOVER = auto()  # its batch is complete; the servers were sent to sleep


class Event(Enum):
    WAITS = auto()  # the learner, for groups that are not there; or the run, for its last evaluations
    COMPLETE = auto()  # the batch is
    ASLEEP = auto()  # the servers of every live worker are


TRANSITIONS = {
    (Owner.LEARNER, Event.WAITS): Owner.SERVERS,
    (Owner.SERVERS, Event.COMPLETE): Owner.HANDOVER,
    # A batch whose frames turn out to be lost is waited for again after that.
    (Owner.HANDOVER, Event.ASLEEP): Owner.LEARNER,
}

DEVICE_SHARING = Machine("The devices of a shared placement", TRANSITIONS, Owner.LEARNER)


class DeviceSharing:
    """The turns of one run.

    >>> sharing = DeviceSharing()
    >>> sharing.lend()
    >>> sharing.owner, sharing.word
    (<Owner.SERVERS: 2>, Wake(v=11, number=1))
    >>> sharing.claim(workers=[]), sharing.owner
    (True, <Owner.LEARNER: 1>)
    """

    def __init__(self) -> None:
        self.owner = Owner.LEARNER
        self.number = 0  # of the present word: an answer to a former one does not count

    @property
    def word(self) -> Sleep | Wake:
        """What every worker is to do now; each is sent it once, and again after its Hello."""
        return Wake(number=self.number) if self.owner is Owner.SERVERS else Sleep(number=self.number)

    def lend(self) -> None:
        """The learner, or the end of the run, waits for the servers."""
        if self.owner is Owner.LEARNER:
            self._move(Event.WAITS)
            self.number += 1

    def claim(self, workers: Iterable[Worker]) -> bool:
        """The learner's batch is complete: does it have the devices? `workers`: the live ones."""
        if self.owner is Owner.SERVERS:
            self._move(Event.COMPLETE)
            self.number += 1
        if self.owner is Owner.HANDOVER and all(worker.asleep == self.number for worker in workers):
            self._move(Event.ASLEEP)
        return self.owner is Owner.LEARNER

    def _move(self, event: Event) -> None:
        self.owner = DEVICE_SHARING.next(self.owner, event)
