"""Whether an attached server drafts as `generate.speculation` says: nobody here has started it."""

from __future__ import annotations

from typing import Any

from streamrl.config.speculation import THRESHOLDS, SpeculationConfig
from streamrl.engine.server import ServerFailed

# What SGLang may call an algorithm that was asked for by another name.
_SAME = {"NEXTN": "EAGLE"}


def check_drafts(arguments: dict[str, Any], drafts: SpeculationConfig, address: str) -> None:
    """Refuse a server, by what it was started with, whose drafts are others, or change what is drawn.

    Raises ServerFailed.
    """
    found, wanted = arguments.get("speculative_algorithm"), drafts.arguments.get("speculative_algorithm")
    if _named(found) != _named(wanted):
        raise ServerFailed(
            f"generate.attach: {address} runs with speculative_algorithm={found}, and generate.speculation.algorithm "
            f"is {drafts.algorithm or 'null'}; allowed: the same at both ends"
        )
    if wanted is None:
        return
    for name in THRESHOLDS:
        if arguments.get(name, 1) != 1:
            raise ServerFailed(
                f"generate.attach: {address} runs with {name}={arguments[name]}, and keeps drafts that the policy "
                "would not have drawn; allowed: 1"
            )
    if arguments.get("device") == "cpu":
        raise ServerFailed(
            f"generate.attach: {address} runs on a CPU, where drafts keep the most probable token at every temperature "
            "(SGLang 0.5.23); allowed: generate.speculation.algorithm=null, and a server without"
        )


def _named(algorithm: str | None) -> str | None:
    name = None if algorithm is None else str(algorithm).upper()
    return name if name is None else _SAME.get(name, name)
