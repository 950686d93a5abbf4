"""SGLang's custom weight loader: takes a version out of kept memory, inside the server's own processes.

    worker ──/update_weights_from_tensor: a LoadPlan──▶ `load`, in each rank ──▶ a Receipt in the worker's memory

The plan travels where SGLang expects tensors, one a rank. An exception here would end the server, so that
everything, good or bad, is in the receipt. torch is imported where it is used: a process that only
names the loader has none.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import xxhash

from streamrl.engine.kept_memory import KeptReader, Unreadable
from streamrl.engine.load_plan import BucketLayout, LoadPlan, Receipt, write_receipt

if TYPE_CHECKING:
    import torch

    from streamrl.device_copy import DeviceCopy

log = logging.getLogger(__name__)


@functools.cache
def _copying() -> DeviceCopy:
    """Into the device of this rank, on which SGLang has put the model."""
    import torch

    from streamrl.device import Device
    from streamrl.device_copy import copying

    has_cuda = torch.cuda.is_available()
    return copying(Device("cuda", torch.cuda.current_device()) if has_cuda else Device("cpu", 0))


def _pin(region: np.ndarray) -> None:
    _copying().pin(region, read_only=True)


_reader = KeptReader(_pin)  # of this rank: the maps are kept from version to version


class Loads(Protocol):
    """A model of SGLang's."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Any: ...


def load(model: Loads, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """What SGLang calls. Each name is a LoadPlan in JSON; what is sent in place of its tensor means nothing."""
    for text, _ in named_tensors:
        plan = msgspec.json.decode(text, type=LoadPlan)
        receipt = load_plan(model, plan, _reader)
        try:
            write_receipt(plan, receipt)
        except OSError as error:
            log.warning("nobody waits for a receipt (%s): %s", error, receipt)


def load_plan(model: Loads, plan: LoadPlan, reader: KeptReader) -> Receipt:
    """Copy the plan's buckets into the model, if they are still what was announced."""
    touched = False
    try:
        with reader.reading(plan.place) as content:
            if plan.verify and (differing := _differing(plan, content)):
                return Receipt(status="refused", reason=differing)
            touched = True
            model.load_weights(_tensors(plan.buckets, content))
    except Unreadable as error:
        return Receipt(status="stale", reason=str(error))
    except Exception as error:  # the worker decides what becomes of the server; here it would end
        log.exception("weights were not loaded")
        return Receipt(status="failed" if touched else "refused", reason=f"{type(error).__name__}: {error}")
    return Receipt(status="loaded")


def _differing(plan: LoadPlan, content: Sequence[np.ndarray]) -> str:
    """The first bucket whose bytes are not those that were announced, in words; empty: all are."""
    for index, (bucket, data) in enumerate(zip(plan.buckets, content, strict=True)):
        found = xxhash.xxh3_64_hexdigest(data.data)
        if found != bucket.checksum:
            return f"bucket {index}: checksum {found}, announced was {bucket.checksum}"
    return ""


def _tensors(buckets: Sequence[BucketLayout], content: Sequence[np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the memory: the model's own copy is the only one."""
    import torch

    for bucket, data in zip(buckets, content, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that must not be written; nobody does
            flat = torch.from_numpy(data)
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            kind = getattr(torch, dtype)
            size = prod(shape) * kind.itemsize
            yield name, flat[start : start + size].view(kind).view(shape)
            start += size
