"""Which sink a server has: that of `publish.transport`, or of adapters."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.generate.adapters import Adapters, AdapterSink
from streamrl.generate.broadcast_sink import BroadcastSink
from streamrl.generate.delta_sink import DeltaSink
from streamrl.generate.disk_sink import DiskSink
from streamrl.generate.gate import RequestGate
from streamrl.generate.kept_loading import KeptLoading
from streamrl.generate.memory_sink import MemorySink
from streamrl.generate.weight_update import WeightUpdate
from streamrl.publish.transport import Sink


def make_sink(
    config: Config,
    client: EngineClient,
    gate: RequestGate,
    adapters: Adapters | None = None,
    *,
    keys: Path | None = None,
) -> Sink:
    """A new end of the publisher's way to one server, whose requests go through `gate`.

    `adapters`: of a server with adapters, None for one that gets whole weights. `keys`: the folder of the run's keys.
    """
    publish = config.publish
    if adapters is not None:
        return AdapterSink(client, adapters, publish.timeout)
    update = WeightUpdate(client, gate, publish)
    loading = KeptLoading(client, update, publish.timeout, config.generate.tensor_parallel)
    match publish.transport:
        case "broadcast":
            return BroadcastSink(client, update, publish.timeout)
        case "disk":
            return DiskSink(client, update, publish.timeout)
        case "memory":
            return MemorySink(loading)
        case "delta":
            return DeltaSink(loading, config.stream, keys, publish.timeout)
