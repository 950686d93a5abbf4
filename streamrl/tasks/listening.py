"""A web application at an address: who reaches it, and one line where it cannot listen."""

from __future__ import annotations

import ipaddress

from aiohttp import web


def is_local(host: str) -> bool:
    """Whether this machine alone reaches what listens there; of a name other than `localhost` that is not known."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run(app: web.Application, host: str, port: int) -> None:
    """Serve until a signal comes. Raises ValueError for an address that cannot be used, and what `app` does."""
    try:
        web.run_app(app, host=host, port=port)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--port: {host}:{port} cannot be used ({reason}); allowed: a free port of this machine"
        ) from None
