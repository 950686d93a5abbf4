"""The ranks of a server, played by a process of their own that can be silent, and be killed.

`python -m tests.publish.receiver` reads lines from its input, a manifest and a number each. It joins the manifest's
group, as SGLang does, and receives the buckets; before bucket NUMBER it says "silent" and waits for a further line.
What it says at the end are the checksums of what it received, or "failed: " and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

REPOSITORY = Path(__file__).parents[2]
LIMIT = 240.0  # seconds of every wait
NEVER = -1


class Receiver:
    """The process as a test has it. `kill` it."""

    def __init__(self, path: str) -> None:
        """`path`: its PYTHONPATH."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.publish.receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._said: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def receive(self, manifest: dict[str, Any], silent_before: int = NEVER) -> None:
        self.go(json.dumps([manifest, silent_before]))

    def go(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def said(self) -> str:
        return self._said.get(timeout=LIMIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())


class Ranks:
    """The only rank of the server."""

    def __init__(self) -> None:
        self._group = ""
        self._members: dist.ProcessGroup | None = None

    def receive(self, manifest: dict[str, Any], silent_before: int) -> list[str]:
        if manifest["group"] != self._group:
            self._join(manifest)
        checksums = []
        for index, bucket in enumerate(manifest["buckets"]):
            if index == silent_before:
                print("silent", flush=True)
                sys.stdin.readline()
            data = torch.empty(bucket["bytes"], dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._members)
            checksums.append(xxhash.xxh3_64_hexdigest(data.numpy().data))
        return checksums

    def _join(self, manifest: dict[str, Any]) -> None:
        name, limit, size = manifest["group"], timedelta(seconds=LIMIT), manifest["world_size"]
        address = f"tcp://{manifest['host']}:{manifest['port']}"
        met, rank, size = next(rendezvous(address, 1, size, timeout=limit))
        store, backend = PrefixStore(name, met), Backend(manifest["backend"])
        members, _ = _new_process_group_helper(
            size, rank, [], backend, store, group_name=GroupName(name), timeout=limit
        )
        _world.pg_group_ranks[members] = {rank: rank for rank in range(size)}
        self._group, self._members = name, members


def main() -> None:
    ranks = Ranks()
    for line in sys.stdin:
        try:
            print(" ".join(ranks.receive(*json.loads(line))), flush=True)
        except RuntimeError as error:
            print(f"failed: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
