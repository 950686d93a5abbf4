"""Which source a run has, and where its versions are staged: `publish.transport`, or that of adapters."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.config import Config
from streamrl.device import detect
from streamrl.engine.kept_memory import DoubleMemory
from streamrl.publish.adapter import AdapterSource
from streamrl.publish.broadcast import BroadcastSource
from streamrl.publish.delta import DeltaSource
from streamrl.publish.disk import DiskSource
from streamrl.publish.memory import MemorySource
from streamrl.publish.staging import Staging
from streamrl.publish.transport import Source
from streamrl.stream.keys import key_folder


def make_staging(config: Config) -> Staging:
    """Where the configured transport's source finds versions."""
    kept = config.publish.transport == "memory" and not config.learner.lora.by_adapter
    return Staging(config.publish.bucket, DoubleMemory() if kept else None)


def make_source(config: Config, run_folder: Path, service: str) -> Source:
    """The learner's end of the configured transport. `service`: the replay service's address."""
    publish = config.publish
    if config.learner.lora.by_adapter:
        return AdapterSource(run_folder, config.learner.lora, config.model.path)
    match publish.transport:
        case "broadcast":
            return BroadcastSource(_own_host(service), detect(), publish.timeout)
        case "disk":
            root = publish.folder / config.run.name if publish.folder else run_folder / "published"
            return DiskSource(root, config.model.path)
        case "memory":
            return MemorySource(publish.verify_every)
        case "delta":
            keys = key_folder(config, run_folder)
            return DeltaSource(_own_host(service), config.stream, keys, publish.verify_every)


def _own_host(service: str) -> str:
    """This machine's address on the way to the replay service, where the servers' workers are as well."""
    parts = urlsplit(service)
    host, port = parts.hostname or "127.0.0.1", parts.port or 1
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses the way
        return str(probe.getsockname()[0])
