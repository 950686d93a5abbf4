"""Flattened buckets to one server after another, by a torch.distributed group with it: gloo, or NCCL with CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.publish.transports.base import Costs, Times, Transport

if TYPE_CHECKING:
    from streamrl.publish.staging import Memory
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


class Broadcast(Transport):
    """A gloo or NCCL broadcast of flattened buckets to one server after another."""

    over_nodes = True
    one_device = False  # NCCL refuses two ranks of a group on one GPU

    def source(self, at: LearnerEnd) -> Source:
        from streamrl.device import detect
        from streamrl.publish.broadcast_source import BroadcastSource

        return BroadcastSource(at.host, detect(), at.config.publish.timeout)

    def sink(self, at: ServerEnd) -> Sink:
        from streamrl.publish.broadcast_sink import BroadcastSink

        return BroadcastSink(at.client, at.update, at.timeout)

    def times(self, costs: Costs) -> Times:
        """One server after another; a GPU gets a bucket while the one before it goes out. Nothing is hashed."""
        each = max(costs.move, costs.across) if costs.beside else costs.move + costs.across
        return Times(costs.copy, each, costs.servers * each)

    def memory(self) -> Memory | None:
        """NCCL's rank 0 is another process (`publish/rank_zero_process.py`)."""
        from streamrl.device import detect
        from streamrl.engine.kept_memory import SingleMemory
        from streamrl.publish.transport import GLOO

        return None if detect().backend == GLOO else SingleMemory()
