"""The adapter's HTTP server: standard library alone. JSON both ways, paths as in `tasks/played_protocol.py`.

    main thread      the event loop in which environments play
    other threads    one for each call, waiting for its episode

What the environment prints goes to standard error; standard output has one line, the address or what is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

from streamrl.tasks.foreign.player import Played, Player, Refused, described

LARGEST = 1 << 20  # bytes of a call: it names sessions, and has no texts
IDLE_TIMEOUT = 60.0  # seconds that a connection may say nothing
CLOSE_TIMEOUT = 10.0  # seconds that an environment may take to close

Load = Callable[[argparse.Namespace], Player]


def run(load: Load, options: argparse.Namespace) -> NoReturn:
    """Load the environment and serve it until a signal, or the end of standard input. Ends the process."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # some libraries ask for it while they load
    try:
        token = _token(options)
        player = _loaded(load, options)
        server = _listening(options, player, loop, token)
    except Refused as refused:
        line = " ".join(str(refused).split())
        print(json.dumps({"refused": line}), file=said, flush=True)
        print(f"adapter: {line}", file=sys.stderr, flush=True)
        os._exit(2)  # a library that was loaded may have threads that it waits for
    host, port = server.server_address[:2]
    ready = {"url": f"http://{host!s}:{port}", "about": about(player)}
    print(json.dumps(ready), file=said, flush=True)
    said.close()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if options.with_parent:
        threading.Thread(target=_wait_for_parent, args=(loop,), daemon=True).start()
    try:
        loop.run_forever()
    except (KeyboardInterrupt, SystemExit):
        pass
    server.shutdown()
    try:
        loop.run_until_complete(asyncio.wait_for(player.close(), CLOSE_TIMEOUT))
    except Exception as error:  # it ends anyway
        print(f"adapter: close: {described(error)}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)  # threads of episodes may still wait for a policy that is gone


def _loaded(load: Load, options: argparse.Namespace) -> Player:
    """Raises Refused, for whatever the environment's own code raises too."""
    try:
        return load(options)
    except Refused:
        raise
    except Exception as error:
        name = options.environment
        raise Refused(f"environment: {name}: {described(error)}; allowed: an environment that loads") from None


def _listening(
    options: argparse.Namespace, player: Player, loop: asyncio.AbstractEventLoop, token: str | None
) -> _Server:
    """Raises Refused for an address that is not free."""
    try:
        return _Server((options.host, options.port), player, loop, token)
    except OSError as error:
        raise Refused(f"--port: {options.host}:{options.port}: {error.strerror}; allowed: a free one") from None


def about(player: Player) -> dict[str, Any]:
    return {"size": player.size, "probes": player.probes, "grouped": player.grouped}


def _token(options: argparse.Namespace) -> str | None:
    """The bearer token. Raises Refused for an address that is open to others without one."""
    if options.token_file is not None:
        text: str = options.token_file.read_text().strip()
        return text
    if not ipaddress.ip_address(options.host).is_loopback:
        raise Refused(f"--host: {options.host} is open to others; allowed: with --token-file FILE")
    return None


def _wait_for_parent(loop: asyncio.AbstractEventLoop) -> None:
    while os.read(0, 1024):
        pass
    loop.call_soon_threadsafe(loop.stop)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # episodes of many groups begin at once

    def __init__(
        self, address: tuple[str, int], player: Player, loop: asyncio.AbstractEventLoop, token: str | None
    ) -> None:
        super().__init__(address, _Handler)
        self._player = player
        self._loop = loop
        self.token = token

    def answer(self, path: str, body: Any) -> Any:
        """Raises ValueError or KeyError for a call that does not fit."""
        if path == "/about":
            return about(self._player)
        if path != "/play":
            raise ValueError(f"no {path}; allowed: /about, /play")
        playing = asyncio.run_coroutine_threadsafe(self._play(body), self._loop)
        return {"scores": [asdict(each) for each in playing.result()]}

    async def _play(self, body: Any) -> list[Played]:
        index, split, urls = int(body["index"]), str(body["split"]), [str(url) for url in body["base_urls"]]
        timeout = float(body["timeout"])
        try:
            played = await asyncio.wait_for(self._player.play(index, split, urls), timeout)
            return [_finite(each) for each in played]
        except TimeoutError:
            late = Played(failure=f"the episode was not over in {timeout:g} seconds")
            return [late] * len(urls)
        except Exception as error:  # whatever the environment raises costs its samples
            print(f"adapter: prompt {index}: {described(error)}", file=sys.stderr)
            return [Played(failure=described(error))] * len(urls)


def _finite(played: Played) -> Played:
    """JSON has no other numbers."""
    for name, number in (("reward", played.reward), *played.parts.items()):
        if not math.isfinite(number):
            return Played(failure=f"{name} is {number}, a finite number is needed")
    return played


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_TIMEOUT

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= LARGEST:
            self._reply(413, {"error": f"{length} bytes; allowed: at most {LARGEST}"})
            return
        self._answer(self.rfile.read(length))

    def _answer(self, body: bytes | None) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.token is not None and not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._reply(401, {"error": "the bearer token is missing or wrong"})
            return
        try:
            self._reply(200, self.server.answer(self.path, json.loads(body) if body else None))
        except (ValueError, KeyError, TypeError) as error:
            self._reply(400, {"error": described(error)})

    def _reply(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the caller has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Calls are not logged."""
