"""A deadline for each request to the hub: its library gives some of them none, and they would wait for ever."""

from __future__ import annotations

import httpx


def bound_requests() -> None:
    """Give every request of this process that has no deadline that of HF_HUB_DOWNLOAD_TIMEOUT (default 10 s a read)."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory  # it has the hooks that make HF_HUB_OFFLINE work

    def bound(request: httpx.Request) -> None:
        given = request.extensions.get("timeout", {})
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {
            kind: constants.HF_HUB_DOWNLOAD_TIMEOUT if given.get(kind) is None else given[kind] for kind in kinds
        }

    def client() -> httpx.Client:
        made = default_client_factory()
        made.event_hooks["request"].append(bound)
        return made

    set_client_factory(client)
