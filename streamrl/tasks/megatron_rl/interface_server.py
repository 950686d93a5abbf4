"""The run's policy at an address, for environments on other machines: one session for each request that it is in.

    http://HOST:PORT/SESSION/base_generate/

The session is in the address, which goes with the request and cannot be guessed; it is over with the request.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from pydantic import ValidationError

from streamrl.tasks.megatron_rl.inference import InferenceInterface, InferenceRequest
from streamrl.tasks.megatron_rl.policy import NoAnswer
from streamrl.tasks.megatron_rl.wire import LARGEST
from streamrl.tasks.session_server import SessionServer


class InterfaceServer(SessionServer[InferenceInterface]):
    """The server of one process, at a free port. `close` it.

    Usage:
        server = InterfaceServer("127.0.0.1")
        await server.start()
        async with server.serving(interface) as address: ...
    """

    largest = LARGEST

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.post("/{session}/base_generate/", self.within(_answer))]


async def _answer(interface: InferenceInterface, request: web.Request) -> web.Response:
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
