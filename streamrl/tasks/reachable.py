"""Whether a server is there before the run starts: one call that must be answered, or one line that says why not."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.tasks.arguments import ARGUMENTS

LOOK_TIMEOUT = 15.0  # seconds, on a busy machine

Reply = TypeVar("Reply")


def server_reply(url: str, headers: Mapping[str, str], kind: str, reply: type[Reply]) -> Reply:
    """The server's reply to one GET. kind: of server, for the message. Raises ValueError, with one line."""
    request = urllib.request.Request(url, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=LOOK_TIMEOUT) as answer:
            return msgspec.json.decode(answer.read(), type=reply)
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"{ARGUMENTS}.url: {url}: {reason}; allowed: the address of an {kind} that runs") from None


def bearer(token_file: Path | None) -> dict[str, str]:
    """The header with the token of a file. Raises ValueError, with one line."""
    if token_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    except OSError as error:
        raise ValueError(f"{ARGUMENTS}.token_file: {token_file}: {error.strerror}; allowed: a readable file") from None
