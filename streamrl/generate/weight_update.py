"""What requests do while a server's weights change: `publish.interruption`, and what a failure leaves behind.

    [drain: gate closed, nothing inside] ──▶ pause ──▶ the sink loads ──▶ continue [──▶ gate open]
    [abort: the same, and what is inside is ended where it is: `generate/requests.py` asks for the rest]

A failure before any weight was touched changes nothing: the server goes on with the old ones. After it
the server may hold parts of two versions and its requests go on waiting, so that no token comes from them; the
publisher tries again, and a version that arrives whole lets them go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from streamrl.config.publish import PublishConfig
from streamrl.engine.client import EngineClient, EngineError, Interruption
from streamrl.generate.gate import RequestGate
from streamrl.generate.pauses import Pauses, Reason
from streamrl.publish.transport import PublishError

CUT_POLL = 0.05  # seconds between two orders to end all requests: one decoding step of a large model


class WeightUpdate:
    """The frame of every change of one server's weights. A sink says in `whole` what it has done to them.

    Usage:
        async with update.waiting():
            await client.update_from_disk(folder, "3.0")
    """

    def __init__(
        self, client: EngineClient, gate: RequestGate, config: PublishConfig, pauses: Pauses | None = None
    ) -> None:
        """`gate` through which the server's requests go; `pauses` of that server, where it has others than these."""
        self.whole = True  # all weights of the server are of one version
        self._client = client
        self._gate = gate
        self._pauses = pauses or Pauses(client, config.timeout)
        self._cuts = config.interruption == "abort"
        self._empties = self._cuts or config.interruption == "drain"
        # Behind a closed gate, `retract` is for what others have in flight, and for what was given up here at its
        # deadline: the server may still be drawing it.
        self._mode: Interruption = "in_place" if config.interruption == "in_place" else "retract"
        self._timeout = config.timeout

    @property
    def flush_cache(self) -> bool:
        """Whether the server is to forget what the old weights computed.

        What is retracted is computed again with the new weights, from an empty cache. `in_place` keeps its
        requests in the cache, and SGLang refuses to flush under them: there the cache is asked for by version
        (`Place.keeps_cache`), so that a request finds in it only what its own version has computed.
        """
        return self._mode == "retract"

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """No token is drawn inside the block. Raises EngineError, or PublishError where requests do not end."""
        if self._empties:
            await self._empty()
        try:
            await self._pause()
            async with self._settled():
                yield
        except asyncio.CancelledError:
            self._gate.open()  # the worker ends: its last requests are not to wait here for ever
            raise

    async def _pause(self) -> None:
        """A server that fails here may have stopped all the same: it is told to go on, and requests come in again."""
        try:
            await self._pauses.begin(Reason.UPDATE, self._mode)
        except EngineError:
            if self.whole:
                try:
                    await self._pauses.end(Reason.UPDATE)
                finally:
                    self._gate.open()
            raise

    @contextlib.asynccontextmanager
    async def _settled(self) -> AsyncIterator[None]:
        """At the end of the block requests go on, unless the weights are in parts."""
        try:
            yield
        except EngineError:
            if self.whole:
                await self._go_on()
            raise
        await self._go_on()

    async def _go_on(self) -> None:
        """The gate opens only once the server draws again: requests inside a paused one could never be drained."""
        await self._pauses.end(Reason.UPDATE)
        self._gate.open()

    async def _empty(self) -> None:
        try:
            await (self._cut() if self._cuts else self._gate.close(self._timeout))
        except TimeoutError as error:
            inside, limit = self._gate.inside, self._timeout
            raise PublishError(f"{inside} requests did not end in publish.timeout={limit:g} s") from error
        except EngineError:
            if self.whole:
                self._gate.open()
            raise
        finally:
            if self._gate.inside:  # they did not end, or nobody waits for them any more
                self._gate.open()

    async def _cut(self) -> None:
        """Close the gate, and end what is inside, again and again: a request may still be on its way to the server."""
        closing = asyncio.ensure_future(self._gate.close(self._timeout))
        try:
            while not closing.done():
                await self._client.abort(timeout=self._timeout)
                await asyncio.wait((closing,), timeout=CUT_POLL)
            await closing
        finally:
            closing.cancel()
