"""A torch.distributed backend for CPU tensors that is lazy, and blocks, as torch's ProcessGroupNCCL does.

What it has of ProcessGroupNCCL, as read in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:

- Joining returns at once. The communicator is made inside the first collective (`collective` calls `initNCCLComm`):
  rank 0 leaves a key in the store, for which the others wait there; then the thread is blocked until all ranks are
  there. No timeout counts in that, a rank that is lost meanwhile is waited for, and `abort` finds no communicator yet.
- A broadcast with `asyncOp` gives a Work. When a rank is lost, its `is_completed` stays False until `abort`; from then
  on it is True, and `wait` raises.
- A broadcast without it, which is the server's, gives None. There the device waits for the bytes, and with it all that
  comes later; a CPU has nothing that could wait but the thread.
- A watchdog ends the process by `abort(3)` when a Work is older than the group's timeout, or than a third of it where
  the connection is lost (the real one then sleeps a minute), unless TORCH_NCCL_BLOCKING_WAIT was set when the group
  was made.
- `shutdown`, which `destroy_process_group` calls, waits for what is under way.

The bytes go by gloo. `install` makes processes that import torch have the backend, also SGLang's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "lazy"
REPOSITORY = Path(__file__).parents[2]
POLL = 0.005  # seconds
FOR_EVER = timedelta(days=1)

_kept: list[Any] = []  # gloo waits, in its destructors, for what is under way


def register() -> None:
    """Make this process know the backend; torch calls it at its import where `install` says so."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, LazyGroup, devices=["cpu"])


def install(folder: Path) -> str:
    """PYTHONPATH for processes that are to have the backend: torch finds it as it finds those of other devices."""
    told = folder / "streamrl_lazy-1.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: streamrl-lazy\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[torch.backends]\nlazy = tests.publish.lazy_backend:register\n")
    return ":".join(filter(None, (str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH"))))


class LazyWork(dist.Work):
    """A broadcast that was begun."""

    def __init__(self, group: LazyGroup, inner: dist.Work) -> None:
        super().__init__()
        self.began = time.monotonic()
        self._group = group
        self._inner = inner
        self._arrived = self.lost = False

    def is_completed(self) -> bool:
        return self.has_arrived() or self._group.aborted

    def has_arrived(self) -> bool:
        if not (self._arrived or self.lost) and self._inner.is_completed():
            try:
                self._inner.wait()
                self._arrived = True
            except RuntimeError:
                self.lost = True
        return self._arrived

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.is_completed():
            time.sleep(POLL)
        if not self.has_arrived():
            raise RuntimeError("the communicator was aborted")
        return True


class LazyGroup(dist.ProcessGroup):
    """The group as one rank has it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.aborted = False
        self._store = store
        self._rank = rank
        self._size = size
        self._communicator: dist.ProcessGroupGloo | None = None
        self._works: list[LazyWork] = []
        self._over = False
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1":
            threading.Thread(target=self._watch, args=(timeout.total_seconds(),), daemon=True).start()

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> LazyWork | None:
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        if self._communicator is None:
            self._communicator = self._connect()
        inner = dist.BroadcastOptions()
        inner.rootRank = options.rootRank
        work = LazyWork(self, self._communicator.broadcast(tensors, inner))
        _kept.append((work, tensors))
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        if options.asyncOp:
            return work
        work.wait()
        return None

    def abort(self) -> None:
        self.aborted = self._over = True

    def shutdown(self) -> None:
        while not all(work.is_completed() for work in self._works):
            time.sleep(POLL)
        self._over = True
        if not self.aborted:
            self._communicator = None

    def _connect(self) -> dist.ProcessGroupGloo:
        if self._rank == 0:
            self._store.set("id", "0")
        else:
            self._store.get("id")  # raises where the store is gone
        try:
            self._store.set(f"here/{self._rank}", "1")
            while not self._store.check([f"here/{rank}" for rank in range(self._size)]):
                time.sleep(POLL)
            communicator = dist.ProcessGroupGloo(self._store, self._rank, self._size, timeout=FOR_EVER)
            _kept.append(communicator)
            return communicator
        except RuntimeError:  # a rank is lost, of which NCCL is told nothing
            while True:
                time.sleep(1.0)

    def _watch(self, timeout: float) -> None:
        while not self._over:
            time.sleep(POLL)
            for work in self._works:
                done = work.is_completed()
                if not done and time.monotonic() - work.began > (timeout / 3 if work.lost else timeout):
                    print("Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
                    os.abort()
