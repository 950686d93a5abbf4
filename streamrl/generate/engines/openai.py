"""An endpoint that speaks OpenAI's completions and tells token ids and log-probs: SGLang's, vLLM's."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from streamrl import choices
from streamrl.generate.engines.base import Engine

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.generate.inference import Policy


class OpenAi(Engine):
    """Weights and sampling are the endpoint's; `model.path` has its tokenizer, and may have no weights."""

    class Options(choices.Options):
        url: str = Field(
            pattern=r"^https?://[^/\s?#@]+(/[^\s?#]*)?$", description="http://HOST:PORT/v1, where /completions is below"
        )
        model: str | None = Field(None, min_length=1, description="its name there; null: the only one that is there")
        key_variable: str = Field(
            "OPENAI_API_KEY", pattern=r"^[A-Za-z_]\w*$", description="environment variable that has the API key"
        )
        retries: int = Field(4, ge=0, description="times that a request is sent again after 429, 5xx or a lost answer")

    options: Options

    @property
    def label(self) -> str:
        return (self.options.model or self.options.url.partition("://")[2]).strip("/").replace("/", "--")

    @asynccontextmanager
    async def serving(self, config: Config, scratch: Path) -> AsyncIterator[Policy]:
        from streamrl.generate.openai_policy import Endpoint, OpenAiPolicy
        from streamrl.generate.tokenizer import Tokenizer

        given = self.options
        endpoint = Endpoint(
            given.url, given.model, given.key_variable, os.environ.get(given.key_variable), given.retries
        )
        policy = OpenAiPolicy(endpoint, config.request_timeout)
        try:
            await policy.check(Tokenizer(config.model.path))
            yield policy
        finally:
            await policy.close()
