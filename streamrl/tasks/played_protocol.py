"""What a worker and an adapter of a foreign library say to each other over HTTP, JSON both ways.

    GET  /about                                         -> AboutPlayer
    POST /play   {index, split, base_urls, timeout}     -> Judged      (one score for each base URL)

The episodes of a call go on until the reply; each asks the policy at its own base URL, in OpenAI's protocol. The
adapter's side needs no package: `streamrl/tasks/foreign/server.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class AboutPlayer(msgspec.Struct, frozen=True):
    """What kind of environment it is."""

    size: int | None = None  # prompts of an epoch; None: no prompt comes back
    probes: int | None = None  # those of the probe split
    grouped: bool = False  # the episodes of a prompt are scored against each other: one call for all of them


class AskPlay(msgspec.Struct, frozen=True):
    index: int
    split: Literal["train", "probe"]
    base_urls: tuple[str, ...]
    timeout: float  # seconds of an episode


class Started(msgspec.Struct, frozen=True):
    """The one line of an adapter's standard output: its address, or why there is none."""

    url: str | None = None
    about: AboutPlayer = AboutPlayer()
    refused: str | None = None
