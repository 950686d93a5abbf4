"""Memory of one host, out of which the servers load for themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from streamrl.publish.transports.base import Costs, Times, Transport

if TYPE_CHECKING:
    from streamrl.publish.staging import Memory as StagingMemory
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


class Memory(Transport):
    """Memory of the learner's host, out of which its servers load for themselves."""

    several_at_once = True
    one_host = True
    staged_copies = 2
    uses = frozenset({"verify_every"})

    def source(self, at: LearnerEnd) -> Source:
        from streamrl.publish.memory_source import MemorySource

        return MemorySource(at.config.publish.verify_every)

    def sink(self, at: ServerEnd) -> Sink:
        from streamrl.publish.memory_sink import MemorySink

        return MemorySink(at.loading)

    def memory(self) -> StagingMemory:
        from streamrl.engine.kept_memory import DoubleMemory

        return DoubleMemory()

    def times(self, costs: Costs) -> Times:
        """A version that is verified is hashed by the learner once, and by each server before it loads."""
        pause = costs.verify + costs.move
        return Times(costs.copy, pause, costs.verify + math.ceil(costs.servers / costs.at_once) * pause)
