"""Which sink a server has: that of `publish.transport`, or of adapters."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.generate.adapters import Adapters, AdapterSink
from streamrl.generate.gate import RequestGate
from streamrl.generate.kept_loading import KeptLoading
from streamrl.generate.pauses import Pauses
from streamrl.generate.weight_update import WeightUpdate
from streamrl.publish.transport import ServerEnd, Sink
from streamrl.publish.transports import transport_of


def make_sink(
    config: Config,
    client: EngineClient,
    gate: RequestGate,
    adapters: Adapters | None = None,
    *,
    pauses: Pauses | None = None,
    keys: Path | None = None,
    ranks: int | None = None,
) -> Sink:
    """A new end of the publisher's way to one server, whose requests go through `gate`.

    `adapters`: of a server with adapters, None for one that gets whole weights. `pauses`: as WeightUpdate takes them.
    `keys`: the folder of the run's keys. `ranks` of the server; None: `generate.tensor_parallel`.
    """
    timeout = config.publish.timeout
    if adapters is not None:
        return AdapterSink(client, adapters, timeout)
    update = WeightUpdate(client, gate, config.publish, pauses)
    loading = KeptLoading(client, update, timeout, config.generate.tensor_parallel if ranks is None else ranks)
    end = ServerEnd(client=client, update=update, loading=loading, stream=config.stream, keys=keys, timeout=timeout)
    return transport_of(config).sink(end)
