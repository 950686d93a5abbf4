"""Which sink a server has: that of `publish.transport`, or of adapters."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.generate.adapters import Adapters, AdapterSink
from streamrl.generate.broadcast_sink import BroadcastSink
from streamrl.generate.disk_sink import DiskSink
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_update import WeightUpdate
from streamrl.publish.transport import Sink


def make_sink(config: Config, client: EngineClient, gate: RequestGate, adapters: Adapters | None = None) -> Sink:
    """A new end of the publisher's way to one server, whose requests go through `gate`.

    `adapters`: of a server with adapters, None for one that gets whole weights.
    """
    publish = config.publish
    if adapters is not None:
        return AdapterSink(client, adapters, publish.timeout)
    update = WeightUpdate(client, gate, publish)
    match publish.transport:
        case "broadcast":
            return BroadcastSink(client, update, publish.timeout)
        case "disk":
            return DiskSink(client, update, publish.timeout)
