"""The run's policy at an address, for environments on other machines: one session for each request that it is in.

    http://HOST:PORT/SESSION/base_generate/

The session is in the address, which goes with the request and cannot be guessed; it is over with the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator

from aiohttp import web
from pydantic import ValidationError

from streamrl.tasks.megatron_rl.inference import InferenceInterface, InferenceRequest
from streamrl.tasks.megatron_rl.policy import NoAnswer
from streamrl.tasks.megatron_rl.wire import LARGEST


class InterfaceServer:
    """The server of one process. `close` it.

    Usage:
        server = InterfaceServer("127.0.0.1")
        await server.start()
        with server.serving(interface) as address: ...
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._port = 0
        self._interfaces: dict[str, InferenceInterface] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen at a free port, unless it does. Raises OSError."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=LARGEST)
            app.router.add_post("/{session}/base_generate/", self._answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            try:
                await web.TCPSite(runner, self._host, 0).start()
            except BaseException:
                await runner.cleanup()
                raise
            self._runner, self._port = runner, runner.addresses[0][1]

    @contextlib.contextmanager
    def serving(self, interface: InferenceInterface) -> Iterator[str]:
        """The address of an interface, HOST:PORT/SESSION, until the end of the block."""
        session = secrets.token_urlsafe(16)
        self._interfaces[session] = interface
        try:
            yield f"{self._host}:{self._port}/{session}"
        finally:
            del self._interfaces[session]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        interface = self._interfaces.get(request.match_info["session"])
        if interface is None:
            return web.Response(status=404, text="no such session, or it is over")
        try:
            asked = InferenceRequest.model_validate_json(await request.read())
            answer = await interface.agenerate(asked)
        except ValidationError as error:
            return web.Response(status=422, text=f"{error}"[:500])
        except ValueError as error:
            return web.Response(status=400, text=f"{error}"[:500])
        except NoAnswer as error:
            return web.Response(status=503, text=f"{error}")
        return web.Response(text=answer.model_dump_json(), content_type="application/json")
