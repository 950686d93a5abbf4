"""Where the learner's batches come from: the replay service, or the record of a former run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from streamrl.config import Config
from streamrl.stream.messages import Bye, Finished, Hello, Next, Progress, Stop
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Batch, PolicyVersion


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a source has: a batch, nothing yet, or the wish to stop."""

    kind: Literal["batch", "nothing", "stop"]
    batch: Batch | None = None
    stats: dict[str, float] = field(default_factory=dict)  # metrics that only the service knows


class BatchSource(Protocol):
    """The learner's view of whatever feeds it."""

    def next(self, step: int, timeout: float) -> Delivery:
        """The batch of learner step `step`, waited for `timeout` seconds at most."""
        ...

    def trained(self, version: PolicyVersion) -> None:
        """Hear that `version` has been made."""
        ...

    def end(self, complete: PolicyVersion | None) -> None:
        """Hear that no more batch will be asked for; `complete`: the run's last version, None when it stopped early."""
        ...

    def close(self) -> None: ...


class ServiceBatches:
    """Batches from the replay service."""

    def __init__(self, address: str, config: Config, version: PolicyVersion) -> None:
        self._dealer = Dealer(address, config.stream, "learner")
        self._dealer.send(Hello(role="learner", name="learner-0", version=version))
        self._asked: int | None = None
        self._asked_at = 0.0
        self._patience = config.stream.reply_timeout

    def next(self, step: int, timeout: float) -> Delivery:
        """Ask for `step`, then wait; the service answers when the groups are complete.

        Asks again from time to time: an answer that was lost with a connection is then given again.
        """
        if self._asked != step or time.monotonic() - self._asked_at > self._patience:
            self._dealer.send(Next(step=step))
            self._asked, self._asked_at = step, time.monotonic()
        received = self._dealer.receive(timeout)
        if isinstance(received, ReceivedBatch) and received.batch.step == step:
            return Delivery("batch", received.batch, _stats(received.stats))
        return Delivery("stop") if isinstance(received, Stop) else Delivery("nothing")

    def trained(self, version: PolicyVersion) -> None:
        self._dealer.send(Progress(version=version))

    def end(self, complete: PolicyVersion | None) -> None:
        self._dealer.send(Bye() if complete is None else Finished(version=complete))

    def close(self) -> None:
        self._dealer.close()


class RecordedBatches:
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
        return Delivery("batch", batch, {"tokens/generated": sum(group.tokens for group in batch.groups)})

    def trained(self, version: PolicyVersion) -> None:
        return None

    def end(self, complete: PolicyVersion | None) -> None:
        return None

    def close(self) -> None:
        return None


def _stats(stats: dict[str, float]) -> dict[str, float]:
    """The service's figures under their metric names."""
    return {
        "tokens/generated": stats["tokens_generated"],
        "idle/generator": 1.0 - stats["generator_busy"],
        "buffer/groups": stats["groups"],
        "buffer/bytes": stats["bytes"],
    }
