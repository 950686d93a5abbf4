"""Hugging Face's `generate` in this process: one request after another, to look for a fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from streamrl import choices
from streamrl.generate.engines.base import Engine

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.generate.inference import Policy


class Transformers(Engine):
    """The weights of `model.path`, in `model.dtype`."""

    loads_weights = True

    class Options(choices.Options):
        device: Literal["cpu", "cuda"] = Field("cpu", description="where the model is")

    options: Options

    @asynccontextmanager
    async def serving(self, config: Config, scratch: Path) -> AsyncIterator[Policy]:
        from streamrl.generate.transformers_policy import TransformersPolicy

        policy = await asyncio.to_thread(
            TransformersPolicy, config.model.path, dtype=config.model.dtype, device=self.options.device
        )
        try:
            yield policy
        finally:
            policy.close()
