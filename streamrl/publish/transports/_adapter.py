"""Low-rank adapters: what `learner.lora.publish: adapter` publishes by, whatever `publish.transport` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.publish.transports.base import Costs, Times, Transport

if TYPE_CHECKING:
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


class Adapter(Transport):
    """A PEFT folder in the run folder; the servers keep the base weights."""

    over_nodes = True

    def source(self, at: LearnerEnd) -> Source:
        from streamrl.publish.adapter_source import AdapterSource

        return AdapterSource(at.run_folder, at.config.learner.lora, at.config.model.path)

    def sink(self, at: ServerEnd) -> Sink:
        raise NotImplementedError("a server with adapters has a sink of its own: generate/adapters.py")

    def times(self, costs: Costs) -> Times:
        return Times(costs.copy, 0.0, costs.servers * costs.network)
