"""How weights can get to the servers: `publish.transport`. `base.py` says what a transport is."""

from __future__ import annotations

from streamrl.choices import Options
from streamrl.config import Config
from streamrl.publish.transports._adapter import Adapter
from streamrl.publish.transports.base import Transport


def transport_of(config: Config) -> Transport:
    """The transport of a run: what `publish.transport` names, or that of adapters."""
    if config.learner.lora.by_adapter:
        return Adapter(Options())
    declaration: type[Transport] = config.publish.chosen("transport")
    return declaration(declaration.Options.model_validate(config.publish.transport_options))
