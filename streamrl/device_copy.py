"""Copies of bytes between a device and host memory, beside its other work: the one place that asks CUDA for them.

    out     tensors ──stream of its own──▶ pinned host memory; `Copied` says when they are there
    into    pinned host memory ──stream of its own──▶ a buffer on the device, while another one is sent

On a CPU both sides are host memory: `out` copies at once, `into` gives what it was given. The CUDA half has never run
on a GPU: its order of calls is tested with a recording stand-in for torch.cuda.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.device import Device

log = logging.getLogger(__name__)

# Bytes of temporary tensors that are held on the device while they are copied: those of some tensor-parallel buckets,
# or of the projections of an 8B model on one GPU, where the model has query, key and value in one weight.
AHEAD = 2 << 30

POLL = 0.001  # seconds between two questions whether a copy has ended; CUDA's own wait has no deadline

# cudaHostRegister's flags: memory that any context may use; memory that is mapped for reading alone.
REGISTER, REGISTER_READ_ONLY = 0x01, 0x08


class Copied(ABC):
    """The end of some copies out of a device: until then their sources must not change, nor their bytes be read."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all bytes are there. Does not wait."""

    def wait(self, timeout: float) -> bool:
        """Wait for it, `timeout` seconds at most. False: it is not done."""
        deadline = time.monotonic() + timeout
        while not self.is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True


class DeviceCopy(ABC):
    """The copies of one process. One thread calls `out` and `mark`; `sending` and `into` may be another one's."""

    @abstractmethod
    def pin(self, memory: np.ndarray, *, read_only: bool = False) -> None:
        """Have the device copy from and to `memory` directly, until it is let go of. Slower where that is refused.

        memory: uint8; all of the array that it is a view of, which has its pages for itself. Once for each array.
        """

    @abstractmethod
    def out(self, tensors: Sequence[Tensor], target: Tensor, resident: Collection[int] = ()) -> None:
        """Begin to copy the tensors' bytes, one behind the other, into `target`, uint8 [bytes] on the host.

        resident: addresses of storages that neither change nor go before the copy is done, such as the weights'.
        Any other tensor is held on the device until then; where they would be more than `AHEAD` bytes, it waits.
        """

    @abstractmethod
    def mark(self) -> Copied:
        """The end of every copy that `out` has begun."""

    @abstractmethod
    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """What the device is given inside waits for `into`, and for nothing else that it does."""

    @abstractmethod
    def into(self, data: Tensor) -> Tensor:
        """Begin to copy `data`, uint8 [bytes] on the host, to the device. Inside `sending`, where it is in order."""


def copying(device: Device) -> DeviceCopy:
    """What copies out of and into `device`."""
    return CudaCopy(device.torch_device) if device.kind == "cuda" else CpuCopy()


class _Done(Copied):
    def is_done(self) -> bool:
        return True


DONE = _Done()  # of copies that were made at once


class CpuCopy(DeviceCopy):
    """Both sides are memory of the host."""

    def pin(self, memory: np.ndarray, *, read_only: bool = False) -> None:
        """Nothing: every copy is direct."""

    def out(self, tensors: Sequence[Tensor], target: Tensor, resident: Collection[int] = ()) -> None:
        for part, tensor in _parts(tensors, target):
            part.copy_(_flat(tensor))

    def mark(self) -> Copied:
        return DONE

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def into(self, data: Tensor) -> Tensor:
        return data


class CudaCopy(DeviceCopy):
    """One stream out, one stream in, beside the one on which the process computes."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, ahead: int = AHEAD) -> None:
        """`cuda`: torch.cuda, or what records how it is called. `ahead`: bytes of temporary tensors that are held."""
        self._device = device
        self._cuda = cuda
        self._ahead = ahead
        self._outwards, self._inwards = cuda.Stream(device), cuda.Stream(device)
        self._held: deque[tuple[Any, list[Tensor]]] = deque()  # event, temporary tensors that are read until then
        self._pinned: dict[int, weakref.finalize] = {}  # by the address of the memory
        self._refused = False

    def pin(self, memory: np.ndarray, *, read_only: bool = False) -> None:
        whole = memory.base if isinstance(memory.base, np.ndarray) else memory
        address = whole.ctypes.data
        known = self._pinned.get(address)
        if self._refused or (known is not None and known.alive):
            return
        runtime = self._cuda.cudart()
        flags = REGISTER | (REGISTER_READ_ONLY if read_only else 0)
        if error := int(runtime.cudaHostRegister(address, whole.nbytes, flags)):
            self._refused = True  # a limit of this machine, which the next ones meet as well
            self._forget_error()
            log.warning("%d bytes are not pinned (cudaHostRegister: error %d): copied more slowly", whole.nbytes, error)
            return
        self._pinned[address] = weakref.finalize(whole, runtime.cudaHostUnregister, address)
        self._pinned[address].atexit = False  # the end of the process lets go of everything

    def out(self, tensors: Sequence[Tensor], target: Tensor, resident: Collection[int] = ()) -> None:
        pairs = [(part, _flat(tensor)) for part, tensor in _parts(tensors, target)]  # gathered where it computes
        self._outwards.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._outwards):
            for part, flat in pairs:
                part.copy_(flat, non_blocking=True)
        passing = [flat for _, flat in pairs if flat.untyped_storage().data_ptr() not in resident]
        if passing:
            self._held.append((self._outwards.record_event(), passing))
        while sum(tensor.nbytes for _, held in self._held for tensor in held) > self._ahead:
            event, _ = self._held[0]
            event.synchronize()
            self._held.popleft()

    def mark(self) -> Copied:
        held = [tensor for _, tensors in self._held for tensor in tensors]
        self._held.clear()
        return _OutOfDevice(self._outwards.record_event(), held)

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self._cuda.stream(self._inwards)
        return stream

    def into(self, data: Tensor) -> Tensor:
        return data.to(self._device, non_blocking=True)

    def _forget_error(self) -> None:
        """CUDA has the next kernel report what an earlier call was refused: that is this one."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


class _OutOfDevice(Copied):
    def __init__(self, event: Any, held: list[Tensor]) -> None:
        """`held`: what is read until the event."""
        self._event = event
        self._held = held

    def is_done(self) -> bool:
        if not self._event.query():
            return False
        self._held = []
        return True


def _parts(tensors: Sequence[Tensor], target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The place in `target` of each tensor, with the tensor."""
    places = target.split([tensor.nbytes for tensor in tensors])
    return list(zip(places, tensors, strict=True))


def _flat(tensor: Tensor) -> Tensor:
    """Its bytes, uint8 [bytes]; a copy where they do not lie one behind the other."""
    together = tensor.detach().contiguous()  # of one element, it may still have strides
    return together.as_strided((together.numel(),), (1,)).view(torch.uint8)
