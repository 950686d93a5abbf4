"""The process that fetches a repository: bars on its standard error, one answer on its standard output.

    python -m streamrl.hub.child '{"name": ..., "part": ...}'  ─▶  {"folder": ...} or {"failure": ..., "reason": ...}

A process of its own, so that a transfer that never ends can be ended (`hub/download.py`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from streamrl.hub.deadlines import bound_requests
from streamrl.hub.files import FILES, IGNORED, Part, lacking
from streamrl.hub.repository import Repository
from streamrl.lifeline import end_with

GRACE = 5.0  # seconds in which it may end after the process that started it


def main() -> None:
    """Fetch what the first argument says, and print the answer."""
    asked = json.loads(sys.argv[1])
    end_with({os.getppid()}, GRACE)
    logging.disable(logging.CRITICAL)  # what the library logs is in what it raises
    bound_requests()
    repository = Repository(name=asked["name"], revision=asked["revision"], cache=Path(asked["cache"]))
    print(json.dumps(_answer(repository, asked["part"])))


def _answer(repository: Repository, part: Part) -> dict[str, Any]:
    import httpx
    from huggingface_hub import errors

    try:
        return {"folder": _fetch(repository, part)}
    except errors.GatedRepoError as error:
        return _failure("gated", error)
    except errors.RepositoryNotFoundError as error:
        return _failure("unknown", error)
    except errors.RevisionNotFoundError as error:
        return _failure("revision", error)
    except (
        httpx.TransportError,
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.XetDownloadError,
    ) as error:
        return _failure("unreachable", error)
    except Exception as error:  # a full disk, a cache that cannot be written: the text says it
        return _failure("other", error)


def _fetch(repository: Repository, part: Part) -> str:
    """The snapshot's folder. Raises what the library raises."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    name, at, root = repository.name, repository.at, repository.root
    commit = HfApi().model_info(name, revision=at, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    if lacking(repository.folder / "snapshots" / str(commit), part):
        print(f"streamrl: {name} at {at} ({commit}): from the hub to {root}", file=sys.stderr)
    else:
        disable_progress_bars()
    return snapshot_download(
        name, revision=at, cache_dir=root, allow_patterns=list(FILES[part]), ignore_patterns=IGNORED
    )


def _failure(kind: str, error: Exception) -> dict[str, Any]:
    cause = error.__cause__ or error
    return {"failure": kind, "reason": " ".join(f"{type(cause).__name__}: {cause}".split())[:200]}


if __name__ == "__main__":
    main()
