"""The learner in the model check: the real ServiceBatches and Publisher, by the rules of learner/lead_loop.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.model_network import Checkpoint, World
from streamrl.config import Config
from streamrl.learner.batches import Delivery, ServiceBatches
from streamrl.observe.events import EventLog
from streamrl.publish.publisher import _END, Publisher
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Source
from streamrl.stream.messages import Bye, Finished, ServerState
from streamrl.stream.peer import Peer
from streamrl.types import Batch, PolicyVersion

STEP = (0.1, 0.8)  # seconds that a learner step takes
KEPT = 2  # checkpoints


class _Source(Source):
    """The bytes of a version are there at once."""

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        return {}

    def send(self, server: ServerState, staged: Staged, check: Callable[[], None]) -> None:
        check()

    def drop(self, server: str) -> None:
        return None

    def close(self) -> None:
        return None


class _SteppedPublisher:
    """The real publisher without its thread: a turn is a look at what the service said, and a step of each publish."""

    def __init__(self, config: Config, folder: Path, version: PolicyVersion, events: EventLog) -> None:
        self.publisher = Publisher(config, folder, version, events)  # `World` keeps its thread from starting
        self._peer = Peer(config, folder, "publisher", self.publisher._opening)
        self._at_once = config.publish.at_once
        self._source = _Source()
        self._going: list[Iterator[None]] = []

    @property
    def free(self) -> bool:
        return not self.publisher._is_new()

    def offer(self, version: PolicyVersion) -> None:
        self.publisher._shared.staged = Staged(version, ())

    def act(self) -> None:
        publisher, peer = self.publisher, self._peer
        if not self._going:
            publisher._receive(peer, 0.0)
            peer.insist()
            staged = publisher._shared.staged
            if staged is None:
                return
            if publisher._is_new():
                publisher._announce(peer, staged)
            if not publisher._shared.stopped:
                due = publisher._due(staged.version)[: self._at_once]
                self._going = [publisher._publish(peer, self._source, server, staged) for server in due]
        self._going = [publish for publish in self._going if next(publish, _END) is not _END]

    def bye(self) -> None:
        self._peer.send(Bye())
        self._peer.close()

    def dies(self) -> None:
        end: Any = self._peer._dealer
        end.vanish()


class LearnerModel:
    """One life of the learner, by the rules of learner/lead_loop.py."""

    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._config = config
        self._world = world
        self._chance = world.chance
        saved = world.checkpoints[-1]
        self.version = PolicyVersion(saved.step, world.incarnations)
        self._source = ServiceBatches(config, folder, self.version, saved.ledger)
        self._publisher = _SteppedPublisher(config, folder, self.version, world.events)
        self._offered: PolicyVersion | None = None
        self._until: float | None = None  # a step goes on so long
        self._batch: Batch | None = None
        self.finished = self.ended = False

    def act(self) -> None:
        self._publisher.act()
        if self.ended or (self._until is not None and self._world.time.now < self._until):
            return
        if self.finished:
            self._receive_the_end()
            return
        if self._batch is not None:
            self._train(self._batch)
            self._batch = self._until = None
        if not self._source.begun(0.0):
            return
        if self._publish_is_due():
            self._offer()
            return  # `offer` waits for the version before
        if self.version.step >= self._config.run.steps:
            self._finish()
            return
        delivery = self._source.next(self.version.step, 0.0)
        if delivery.kind == "stop":
            raise AssertionError(f"the run was ended at step {self.version.step}")
        if delivery.batch is not None:
            self._begin(delivery)
        elif delivery.kind == "lost" and self._is_catching_up() and self._offered != self.version:
            self._offer()

    def dies(self) -> None:
        self._publisher.dies()
        end: Any = self._source._peer._dealer
        end.vanish()

    def _begin(self, delivery: Delivery) -> None:
        batch = self._batch = delivery.batch
        assert batch is not None
        self._until = self._world.time.now + self._chance.uniform(*STEP)
        if self._world.faulty and self._chance.random() < 0.03:
            group = self._chance.choice(batch.groups)
            self._source.quarantined(batch.step, (group.group_id, group.attempt), "the schedule says so")
            self._world.count("quarantined")

    def _train(self, batch: Batch) -> None:
        self._world.trains(batch)
        self.version = PolicyVersion(self.version.step + 1, self.version.incarnation)
        self._source.trained(self.version, {})
        if self.version.step % self._world.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        kept = [*self._world.checkpoints, Checkpoint(self.version.step, self._source.ledger)][-KEPT:]
        self._world.checkpoints = kept
        self._source.saved(self.version, kept[0].step)

    def _finish(self) -> None:
        self.finished = True
        self._source._last = Finished(version=self.version)  # as `end` does, which waits
        self._source._peer.send(self._source._last)

    def _receive_the_end(self) -> None:
        self._source._peer.beat()
        self._source._handle(0.0)
        if self._source._stopped:
            self.ended = True
            self._publisher.bye()
            self._source.close()

    def _publish_is_due(self) -> bool:
        if self._is_catching_up() or self._offered == self.version:
            return False
        step, published = self.version.step, self._source.published
        last = step >= self._config.run.steps
        has_caught_up = self._offered is None or (published is not None and self._offered.step < published.step)
        return has_caught_up or step % self._config.publish.every == 0 or last

    def _is_catching_up(self) -> bool:
        published = self._source.published
        return published is not None and self.version.step < published.step

    def _offer(self) -> None:
        if self._publisher.free:
            self._publisher.offer(self.version)
            self._offered = self.version
