"""Fetching a model in a process of its own, which is ended when nothing arrives any more."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from streamrl.hub.files import Part
from streamrl.hub.repository import Repository

TICK = 0.5  # seconds between two looks at how much has arrived


class HubError(RuntimeError):
    """The hub did not give what was asked for."""

    def __init__(self, kind: str, reason: str) -> None:
        """`kind`: gated | unknown | revision | unreachable | stalled | other."""
        super().__init__(reason)
        self.kind = kind


def fetch(repository: Repository, part: Part, timeout: float) -> Path:
    """Fetch what the cache lacks of a model. Returns the snapshot's folder.

    What was there before is not fetched again, and a transfer that was cut goes on. The bars are on standard error.
    Raises HubError, and after `timeout` seconds in which nothing arrived.
    """
    at = {"revision": repository.revision, "cache": str(repository.root)}
    asked = {"name": repository.name, "part": part, **at}
    command = [sys.executable, "-m", "streamrl.hub.child", json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = _answer_of(process, repository.folder, timeout).splitlines()
        finally:
            process.kill()
    answer = json.loads(said[-1]) if said and process.returncode == 0 else {}
    if "folder" in answer:
        return Path(answer["folder"])
    reason = answer.get("reason", f"the process that fetches ended with exit code {process.returncode}")
    raise HubError(answer.get("failure", "other"), reason)


def _answer_of(process: subprocess.Popen[str], folder: Path, timeout: float) -> str:
    """Its output, once it has ended. Raises HubError where nothing arrives in `folder` for `timeout` seconds."""
    arrived, since = _bytes(folder), time.monotonic()
    while True:
        try:
            return process.communicate(timeout=TICK)[0]
        except subprocess.TimeoutExpired:
            if (now := _bytes(folder)) != arrived:
                arrived, since = now, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise HubError("stalled", f"nothing arrived for {timeout:g} s") from None


def _bytes(folder: Path) -> int:
    """Bytes of the files in a repository's cache, whole ones and those that are on their way."""
    total = 0
    for path in folder.glob("blobs/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it has just got its name
            continue
    return total
