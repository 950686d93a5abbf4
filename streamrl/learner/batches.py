"""Where the learner's batches come from: the replay service, or the record of a former run."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from streamrl.config import Config
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import (
    MAX_REASON,
    Bye,
    Evaluated,
    Exited,
    Finished,
    GaveUp,
    Hello,
    Lost,
    Measured,
    Message,
    Next,
    Progress,
    Quarantined,
    Saved,
    Stop,
    Welcome,
)
from streamrl.stream.peer import Peer
from streamrl.stream.sockets import ReceivedBatch, StreamTimeout
from streamrl.trainable import Limits
from streamrl.types import Batch, Ledger, PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a source has: a batch, nothing yet, groups of it that were lost and are generated again, or the wish to
    stop."""

    kind: Literal["batch", "nothing", "lost", "stop"]
    batch: Batch | None = None
    stats: dict[str, Any] = field(default_factory=dict)  # metrics that only the service knows
    failure: str | None = None  # of a stop: why the run is given up; None where it is over in good order


class BatchSource(Protocol):
    """The learner's view of whatever feeds it."""

    @property
    def published(self) -> PolicyVersion | None:
        """The newest version that any server ever had; None where that is none. Known once `begun`."""
        ...

    @property
    def ledger(self) -> Ledger | None:
        """The groups that the learner's weights contain, for its checkpoint; None where nobody keeps account."""
        ...

    def begun(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most for the source to know the learner. True once it does."""
        ...

    def next(self, step: int, timeout: float) -> Delivery:
        """The batch of learner step `step`, waited for `timeout` seconds at most."""
        ...

    def quarantined(self, step: int, group: tuple[int, int], reason: str) -> None:
        """Called when a group of `step`, (group id, attempt), cannot be trained: it is never delivered whole again."""
        ...

    def measured(self, step: int, ess: Sequence[float | None]) -> None:
        """Receive the effective sample size of each group of `step`, in the batch's order; before `trained`."""
        ...

    def trained(self, version: PolicyVersion, measured: Mapping[str, float]) -> None:
        """Called when `version` has been made; measured: the metrics of its step."""
        ...

    def saved(self, version: PolicyVersion, oldest: int) -> None:
        """Called when a checkpoint of `version` is complete; `oldest` is the step of the oldest one that is kept."""
        ...

    def end(self, complete: PolicyVersion | None) -> Sequence[Evaluated]:
        """Called when no more batch will be asked for; `complete`: the run's last version, None if it stopped early.

        Returns the evaluations that came too late for the last batch.
        """
        ...

    def exit(self, version: PolicyVersion, reason: str) -> None:
        """Called when the run ends at `version`, which is saved, though it is not complete: everyone ends."""
        ...

    def gave_up(self, reason: str) -> None:
        """Called when the run cannot go on: everyone ends with this reason."""
        ...

    def close(self) -> None: ...


class ServiceBatches:
    """Batches from the replay service, which may be killed and started again at any moment.

    Whatever the service forgets is said again: who the learner is, what its weights contain (`ledger`), which
    step it waits for, and that it has finished.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        version: PolicyVersion,
        ledger: Ledger | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`version` of the weights that training goes on from, with the ledger of their checkpoint, if any.

        `limits`: what this learner can train.

        Raises TimeoutError where no service has published its address in `run.start_timeout`.
        """
        self.published: PolicyVersion | None = None
        self.ledger = ledger
        self._config = config
        self._run = run_identity(run_folder, config.run.id).id
        self._version = version
        self._limits = limits
        self._delivered: Ledger | None = None  # as it will be when the batch delivered last is trained
        self._quarantined: list[Quarantined] = []  # of the steps that may be delivered again
        self._welcomed = False
        self._stopped = False
        self._failure: str | None = None  # why the run was given up, if it was
        self._asked: int | None = None
        self._lost: int | None = None  # the step whose groups are generated again, of those that servers are beyond
        self._since = time.monotonic()  # that it was asked, or of the greeting
        self._last: Finished | Exited | None = None  # what was said of the end, for a service that was started again
        self._late: list[Evaluated] = []  # that came without a batch
        self._peer = Peer(config, run_folder, "learner", self._opening)

    def begun(self, timeout: float) -> bool:
        """Wait for the service's Welcome. Raises StreamTimeout after `run.start_timeout` seconds without it.

        Raises PeerRefused, as `next` does, where the service serves another run, or cannot serve these weights.
        """
        limit = self._config.run.start_timeout
        if time.monotonic() - self._since > limit:
            raise StreamTimeout(
                f"the replay service did not welcome the learner in run.start_timeout={limit:g} seconds"
            )
        if not self._welcomed and not self._stopped:
            self._peer.beat()
            self._peer.insist()
            self._handle(timeout)
        return self._welcomed or self._stopped

    def next(self, step: int, timeout: float) -> Delivery:
        """Ask for `step`, then wait; the service answers when the groups are complete.

        Raises StreamTimeout when the service sends nothing for `run.silence_timeout` seconds.
        """
        if self._asked != step:
            self._asked, self._since = step, time.monotonic()
            self._peer.ask(Next, Next(step=step))
        self._peer.beat()
        received = None if self._stopped else self._handle(timeout)
        if self._stopped:
            return Delivery("stop", failure=self._failure)
        if isinstance(received, ReceivedBatch) and received.batch.step == step:
            self._delivered = received.ledger
            return Delivery("batch", received.batch, _metrics(received.stats))
        self._check_silence()
        return Delivery("lost" if self._lost == step else "nothing")

    def quarantined(self, step: int, group: tuple[int, int], reason: str) -> None:
        group_id, attempt = group
        self._quarantined.append(Quarantined(step=step, group_id=group_id, attempt=attempt, reason=reason[:MAX_REASON]))
        if self._delivered is not None:
            held = self._delivered.quarantined | {group_id: attempt}
            self._delivered = replace(self._delivered, quarantined=held)
        self._peer.send(self._quarantined[-1])

    def measured(self, step: int, ess: Sequence[float | None]) -> None:
        self._peer.send(Measured(step=step, ess=tuple(ess)))

    def trained(self, version: PolicyVersion, measured: Mapping[str, float]) -> None:
        self._version, self.ledger, self._asked = version, self._delivered, None
        self._peer.answered(Next)
        values = {name: float(measured[name]) for name in self._config.replay.adaptive.signals if name in measured}
        self._peer.send(
            Progress(version=version, signals={name: each for name, each in values.items() if math.isfinite(each)})
        )

    def saved(self, version: PolicyVersion, oldest: int) -> None:
        self._quarantined = [each for each in self._quarantined if each.step >= oldest]
        self._peer.send(Saved(version=version, oldest=oldest))

    def end(self, complete: PolicyVersion | None) -> Sequence[Evaluated]:
        """Say Bye; or say Finished and wait until the service says Stop.

        That takes `stream.reply_timeout` at most, and `evaluate.longest` more where the last version is evaluated.
        """
        if complete is not None:
            self._say_last(Finished(version=complete), self._config.evaluate.longest)
            return self._late
        self._asked = None
        self._peer.answered(Next)
        self._peer.send(Bye())
        return self._late

    def exit(self, version: PolicyVersion, reason: str) -> None:
        """Say so, and wait until the service says Stop, `stream.reply_timeout` at most."""
        self._say_last(Exited(version=version, reason=reason))

    def _say_last(self, word: Finished | Exited, longer: float = 0.0) -> None:
        """Wait until the service says Stop: `stream.reply_timeout` and so much `longer` at most."""
        self._last, self._asked = word, None
        self._peer.answered(Next)
        self._peer.send(word)
        deadline = time.monotonic() + self._config.stream.reply_timeout + longer
        while not self._stopped and time.monotonic() < deadline:
            self._peer.beat()
            self._handle(self._config.learner.tick)

    def gave_up(self, reason: str) -> None:
        """Tell the service, if it is there, that the run ends with an error: everyone else then ends too."""
        try:
            self._peer.send(GaveUp(reason=reason[:MAX_REASON]))
        except StreamTimeout as error:
            log.warning("nobody was told that the run is given up: %s", error)

    def close(self) -> None:
        self._peer.close()

    def _opening(self) -> Iterator[Message]:
        hello = Hello(run=self._run, role="learner", name="learner-0", version=self._version, limits=self._limits)
        yield replace(hello, ledger=self.ledger)
        yield from self._quarantined
        if self._last is not None:
            yield self._last

    def _handle(self, timeout: float) -> Message | ReceivedBatch | None:
        """One message, noted."""
        received = self._peer.receive(timeout)
        if isinstance(received, Welcome):  # a service that was started again may know less
            known = (each for each in (self.published, received.published) if each is not None)
            self.published, self._welcomed = max(known, default=None), True
        elif isinstance(received, Lost):
            self._lost = received.step
        elif isinstance(received, Evaluated):
            self._late.append(received)
        elif isinstance(received, Stop):
            self._stopped, self._failure = True, received.reason if received.failed else None
        return received

    def _check_silence(self) -> None:
        limit = self._config.run.silence_timeout
        if min(self._peer.silence, time.monotonic() - self._since) > limit:
            raise StreamTimeout(f"no message from the replay service in run.silence_timeout={limit:g} seconds")


class LocalBatches(ABC):
    """Batches that the learner has by itself: nobody else keeps account of them, or has to be told of their end."""

    published = None
    ledger = None

    @abstractmethod
    def next(self, step: int, timeout: float) -> Delivery:
        """As `BatchSource` has it."""

    def begun(self, timeout: float) -> bool:
        return True

    def quarantined(self, step: int, group: tuple[int, int], reason: str) -> None:
        return None

    def measured(self, step: int, ess: Sequence[float | None]) -> None:
        return None

    def trained(self, version: PolicyVersion, measured: Mapping[str, float]) -> None:
        return None

    def saved(self, version: PolicyVersion, oldest: int) -> None:
        return None

    def end(self, complete: PolicyVersion | None) -> Sequence[Evaluated]:
        return ()

    def exit(self, version: PolicyVersion, reason: str) -> None:
        return None

    def gave_up(self, reason: str) -> None:
        return None

    def close(self) -> None:
        return None


class RecordedBatches(LocalBatches):
    """Batches of a recorded run, in its order."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches: Iterator[Batch] = iter(batches)

    def next(self, step: int, timeout: float) -> Delivery:
        """The recorded batch of `step`; stops at the end of the record. Raises ValueError for a gap."""
        batch = next((batch for batch in self._batches if batch.step >= step), None)
        if batch is None:
            return Delivery("stop")
        if batch.step != step:
            raise ValueError(f"the record has no batch of step {step}, the next is {batch.step}")
        return Delivery("batch", batch, {"tokens/generated": sum(group.tokens for group in batch.fresh)})


def _metrics(stats: dict[str, Any]) -> dict[str, Any]:
    """The service's figures under their metric names."""
    return {
        "tokens/generated": stats["tokens_generated"],
        "idle/generator": 1.0 - stats["generator_busy"],
        "buffer/groups": stats["groups"],
        "buffer/bytes": stats["bytes"],
        **({"speculation/accept_length": 1 + stats["drafts"] / verified} if (verified := stats["verified"]) else {}),
        **stats["selection"],
        **stats["evaluation"],
        **stats["mismatch"],
        **({"staleness/reason": stats["bound"]} if stats["bound"] else {}),
    }
