"""What replaces torch.cuda where there is no GPU: streams that work only when they are told to, and a log of calls.

Copies that are given to a stream by `copy_` with `non_blocking` wait in its queue under `recording`, as on a GPU; what
the process computes is done at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self._stream.cuda.log.append(("synchronize", self._stream.name))
        self._stream.work(until=self)


class Stream:
    """Its queue holds copies, and events."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.queue: list[Callable[[], object] | Event] = []

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append((f"{self.name} waits for", other.name))

    def record_event(self) -> Event:
        self.queue.append(Event(self))
        assert isinstance(self.queue[-1], Event)
        return self.queue[-1]

    def work(self, until: Event | None = None) -> None:
        """Do what is in the queue, up to an event, or all of it."""
        while self.queue:
            first = self.queue.pop(0)
            if not isinstance(first, Event):
                first()
                continue
            first.reached = True
            if first is until:
                return


class Runtime:
    """torch.cuda.cudart()."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}  # address -> bytes
        self.asked: list[tuple[int, int]] = []  # bytes, flags

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append((size, flags))
        if not self.error:
            assert address % 4096 == 0
            assert address not in self.registered
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class RecordedCuda:
    """Streams are named in the order in which they are made: "out", "in"."""

    def __init__(self, error: int = 0) -> None:
        """`error`: of cudaHostRegister."""
        self.log: list[tuple[str, str]] = []
        self.runtime = Runtime(error)
        self.streams = {"compute": Stream(self, "compute")}
        self._current = self.streams["compute"]

    def Stream(self, device: torch.device) -> Stream:
        name = ("out", "in")[len(self.streams) - 1]
        self.streams[name] = Stream(self, name)
        return self.streams[name]

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        former, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = former

    def cudart(self) -> Runtime:
        return self.runtime

    def recording(self) -> TorchDispatchMode:
        """Inside, copies that need not be waited for go to the current stream's queue."""
        return _Recording(self)


class _Recording(TorchDispatchMode):
    def __init__(self, cuda: RecordedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._cuda.current_stream(torch.device("cpu"))
        if func is not torch.ops.aten.copy_.default or stream.name == "compute":
            return func(*args, **kwargs)
        target, source, *rest = args
        assert kwargs.get("non_blocking", rest[0] if rest else False), "a copy that the host would wait for"
        self._cuda.log.append(("copy on", stream.name))
        stream.queue.append(lambda: func(target, source))
        return target
