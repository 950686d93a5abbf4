"""An SGLang server: the one engine that a run trains with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.generate.engines.base import Engine

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.generate.inference import Policy


class Sglang(Engine):
    """A server of its own, in the settings of `generate`."""

    trains = True
    loads_weights = True
    loads_adapters = True

    @asynccontextmanager
    async def serving(self, config: Config, scratch: Path) -> AsyncIterator[Policy]:
        from streamrl.generate.one_server import OneServer
        from streamrl.generate.served import ServedModel

        served = ServedModel(config, scratch, index=0)
        try:
            await served.start()
            yield OneServer.of(served)
        finally:
            await served.close()
