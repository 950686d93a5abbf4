"""The one place that knows which accelerator this machine has."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from streamrl.device import Device, UnsupportedAcceleratorError, detect


def test_a_machine_without_an_accelerator_is_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = detect()
    assert device == Device("cpu", 0)
    assert (device.backend, device.distributed_optimizer, device.memory()) == ("gloo", False, {})
    assert device.torch_device == torch.device("cpu")


def test_cuda_takes_the_gpu_of_the_local_rank_and_refuses_a_rank_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = detect(local_rank=1)
    assert (device.torch_device, device.backend) == (torch.device("cuda", 1), "nccl")
    assert device.distributed_optimizer
    with pytest.raises(UnsupportedAcceleratorError, match="local rank 2 has no GPU of its own, this machine has 2"):
        detect(local_rank=2)


def test_a_clock_waits_for_what_is_computed_and_not_for_the_publishers_streams(monkeypatch):
    waited: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: {3: stream}[index])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits for every stream of the device"))
    Device("cuda", 3).synchronize()
    Device("cpu", 0).synchronize()
    assert waited == [1]


def test_rocm_and_ascend_are_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedAcceleratorError, match=r"ROCm 6\.4: .*missing are"):
        detect()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "torch_npu" else found(name))
    with pytest.raises(UnsupportedAcceleratorError, match=r"Ascend NPU .*missing are"):
        detect()
