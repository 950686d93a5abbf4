"""What the service knows of a run, and how it sends: shared by the three sides that it has towards its peers.

No I/O of its own: the way out is passed in, and so is the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from streamrl.config import Config
from streamrl.observe.events import Events
from streamrl.replay.admission import Admission
from streamrl.replay.delivery import Delivery
from streamrl.replay.device_sharing import DeviceSharing
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.peers import Peers
from streamrl.replay.phases import Phases
from streamrl.replay.workers import Worker, Workers
from streamrl.stream.messages import MAX_REASON, Buffer, Message, Stop
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

Send = Callable[[bytes, Message, Sequence[Buffer]], bool]


class RunParts:
    """One run."""

    def __init__(self, config: Config, durable: DurableBuffer, send: Send, events: Events) -> None:
        """`send`: a message and further frames to a peer by its identity; False where it cannot be reached."""
        self.config = config
        self.durable = durable
        self.buffer = durable.buffer
        self.events = events
        self.workers = Workers(config.generate.heartbeat)
        self.peers = Peers()
        self.admission = Admission(config.generate.group_size, config.task.max_branches)
        self.delivery = Delivery(durable, self.workers, events)
        self.evaluations = self.delivery.evaluations
        self.sharing = DeviceSharing() if config.run.shares_devices else None
        self.phases = Phases(config.publish.timeout, config.evaluate.longest, config.run.stop_timeout)
        self._send = send
        self._stop: Stop | None = None  # that was sent to every peer
        self._unstopped: list[bytes] = []  # those that it could not be sent to

    def send(self, identity: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """False: the peer is gone or does not read."""
        return self._send(identity, message, frames)

    def send_worker(self, worker: Worker, message: Message) -> bool:
        """A worker that cannot be reached is as good as silent; its tickets have their leases."""
        if self.send(worker.identity, message):
            return True
        if not worker.lost:
            self.workers.lose(worker)
            self.events.emit("worker.silent", worker=worker.name, reason="it does not take messages")
        return False

    def send_publisher(self, message: Message) -> bool:
        """False where there is none."""
        return self.peers.publisher is not None and self.send(self.peers.publisher, message)

    def acknowledge(self, version: PolicyVersion) -> None:
        """A server generates with `version`."""
        if self.buffer.acknowledge(version):
            self.events.emit("publish.acknowledged", version=version, slots=self.buffer.charged)

    def give_up(self, reason: str) -> None:
        """End the run: this service, started again, would end the same way."""
        if self.phases.goes_on:
            self.events.emit("gave_up", reason=reason)
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """The run has failed; one that stops has come to its end before, and ends as it was told to everybody."""
        if not self.phases.goes_on:
            log.warning("while the run stops: %s", reason)
            return
        self.phases.fail()
        self.send_stop(reason)

    def send_stop(self, reason: str) -> None:
        """Tell every peer that it is over, after the phase has changed."""
        code, failed = self.phases.code, self.phases.has_failed
        log.log(logging.ERROR if failed else logging.INFO, "stop: %s", reason)
        self.events.emit("replay.stop", reason=reason, code=code)
        peers = (*(worker.identity for worker in self.workers.known), self.peers.learner, self.peers.publisher)
        self._stop = Stop(reason=reason[:MAX_REASON], failed=failed)
        self._unstopped = [identity for identity in peers if identity is not None]
        self.repeat_stop()

    def repeat_stop(self) -> None:
        """To those that could not be reached: their connections may come back."""
        if (stop := self._stop) is not None:
            self._unstopped = [identity for identity in self._unstopped if not self.send(identity, stop)]
