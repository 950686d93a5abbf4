"""What changed since the version before, over a socket of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.publish.transports.base import Costs, Times, Transport

if TYPE_CHECKING:
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


class Delta(Transport):
    """What changed since the version before, for links that are slower than the learner's memory."""

    staged_copies = 2
    server_copies = 1
    uses = frozenset({"verify_every"})

    def source(self, at: LearnerEnd) -> Source:
        from streamrl.publish.delta_source import DeltaSource
        from streamrl.stream.keys import key_folder

        config = at.config
        return DeltaSource(at.host, config.stream, key_folder(config, at.run_folder), config.publish.verify_every)

    def sink(self, at: ServerEnd) -> Sink:
        from streamrl.publish.delta_sink import DeltaSink

        return DeltaSink(at.loading, at.stream, at.keys, at.timeout)

    def times(self, costs: Costs) -> Times:
        """Hashed, compared with the version before and kept once; each worker hashes what it has made of it."""
        pause = costs.verify + costs.move
        each = costs.changed * costs.across + costs.hash + pause
        return Times(costs.copy, pause, costs.hash + 2 * costs.scan + costs.servers * each)
