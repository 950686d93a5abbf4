"""The policy as an adapter asks it: one session of the run's endpoint, in OpenAI's protocol, standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

ANSWER_TIMEOUT = 600.0  # seconds that one answer may take; the episode's own deadline is the worker's, and shorter


class PolicyGone(ConnectionError):
    """The session gave no answer: it is over, or its servers are."""


class Policy:
    """One episode's conversation. Blocking: run it in a thread of its own.

    Usage:
        policy = Policy(base_url, chat=True, system=None)
        policy.answer("Guess my number.")
    """

    def __init__(self, base_url: str, *, chat: bool, system: str | None) -> None:
        self._base_url = base_url
        self._messages: list[dict[str, Any]] | None = [] if chat else None
        self._text = ""
        self._system = system

    def answer(self, observation: str) -> str:
        """What the policy says to an observation. Raises PolicyGone."""
        if self._messages is None:
            self._text += (self._system or "") * (not self._text) + observation
            said: str = self._call("completions", {"prompt": self._text})["text"]
            self._text += said
            return said
        if not self._messages and self._system:
            self._messages.append({"role": "system", "content": self._system})
        self._messages.append({"role": "user", "content": observation})
        message: dict[str, Any] = self._call("chat/completions", {"messages": self._messages})["message"]
        self._messages.append(message)
        return message["content"] or ""

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._base_url}/{path}",
            json.dumps({"model": "policy", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            # No proxy: the endpoint is the run's own.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=ANSWER_TIMEOUT) as reply:
                choice: dict[str, Any] = json.load(reply)["choices"][0]
                return choice
        except urllib.error.HTTPError as error:
            raise PolicyGone(f"status {error.code}: {error.read()[:200].decode(errors='replace')}") from None
        except OSError as error:
            raise PolicyGone(str(error)) from None
