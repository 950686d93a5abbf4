"""Copies between a device and host memory: what is where at which moment, and in which order CUDA is asked."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch

from streamrl.device import Device
from streamrl.device_copy import CpuCopy, CudaCopy, copying
from streamrl.engine.kept_memory import DoubleMemory, KeptMemory, KeptReader
from streamrl.publish.staging import Staging
from streamrl.types import PolicyVersion
from tests.recorded_cuda import RecordedCuda

CPU = torch.device("cpu")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_on_a_cpu_bytes_are_there_when_the_call_returns_and_are_sent_from_where_they_are():
    target = torch.zeros(12, dtype=torch.uint8)
    copy = copying(Device("cpu", 0))
    assert isinstance(copy, CpuCopy)
    copy.out([torch.ones(1), torch.full((2,), 2.0)], target)
    assert target.view(torch.float32).tolist() == [1.0, 2.0, 2.0]
    assert copy.mark().is_done()
    with copy.sending():
        assert copy.into(target) is target


def test_a_copy_out_of_the_device_waits_for_what_computes_and_nothing_waits_for_it():
    cuda, weight = RecordedCuda(), torch.arange(4.0)
    copy, target = CudaCopy(CPU, cuda), torch.zeros(16, dtype=torch.uint8)
    with cuda.recording():
        copy.out([weight], target, {storage(weight)})
        copied = copy.mark()
    assert cuda.log == [("out waits for", "compute"), ("copy on", "out")]
    assert not copied.is_done()
    assert not copied.wait(0.0)
    assert target.sum() == 0
    cuda.streams["out"].work()
    assert copied.wait(0.0)
    assert torch.equal(target.view(torch.float32), weight)


def test_what_is_gathered_for_a_copy_is_held_until_its_end_and_no_more_of_it_than_is_allowed():
    cuda = RecordedCuda()
    copy = CudaCopy(CPU, cuda, ahead=8)
    targets = [torch.zeros(4, dtype=torch.uint8) for _ in range(4)]
    with cuda.recording():
        for number, target in enumerate(targets):
            gathered = torch.full((1,), float(number))
            copy.out([gathered], target)
        copied = copy.mark()
    assert cuda.log.count(("synchronize", "out")) == 2  # for the first, and for the second
    assert [target.view(torch.float32).item() for target in targets] == [0.0, 1.0, 0.0, 0.0]
    cuda.streams["out"].work()
    assert copied.is_done()
    assert [target.view(torch.float32).item() for target in targets] == [0.0, 1.0, 2.0, 3.0]


def test_gathered_tensors_go_when_their_copy_has_ended():
    cuda = RecordedCuda()
    copy, target = CudaCopy(CPU, cuda), torch.zeros(4, dtype=torch.uint8)
    gathered = torch.ones(2, 2)[:, :1][:1]
    with cuda.recording():
        copy.out([gathered], target)
        copied = copy.mark()
    gone = [weakref.ref(tensor) for tensor in copied._held]
    assert gone
    assert all(reference() is not None for reference in gone)
    cuda.streams["out"].work()
    assert copied.is_done()
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_weights_that_stay_where_they_are_are_never_waited_for():
    cuda, weights = RecordedCuda(), torch.arange(64.0)
    copy, target = CudaCopy(CPU, cuda, ahead=8), torch.zeros(4, dtype=torch.uint8)
    with cuda.recording():
        for number in range(8):
            copy.out([weights[number : number + 1]], target, {storage(weights)})
    assert ("synchronize", "out") not in cuda.log
    cuda.streams["out"].work()
    assert target.view(torch.float32).item() == 7.0


def test_what_goes_to_the_device_goes_on_a_stream_of_its_own():
    cuda = RecordedCuda()
    copy = CudaCopy(CPU, cuda)
    with copy.sending():
        assert cuda.current_stream(CPU).name == "in"
        assert copy.into(torch.zeros(3, dtype=torch.uint8)).tolist() == [0, 0, 0]
    assert cuda.current_stream(CPU).name == "compute"


def test_memory_is_pinned_whole_and_once_and_let_go_of_before_it_is_unmapped():
    cuda = RecordedCuda()
    staging = Staging(1 << 16, copy=CudaCopy(CPU, cuda))
    for step in range(3):
        with cuda.recording():
            staged = staging.fill(PolicyVersion(step), [("w", torch.zeros(9000 - step))])
        cuda.streams["out"].work()
    assert [size for size, _ in cuda.runtime.asked] == [36000]
    staging.leave()  # a reader may have it: it is neither given again nor let go of
    with cuda.recording():
        staging.fill(PolicyVersion(3), [("w", torch.zeros(9000))])
    assert len(cuda.runtime.registered) == 2
    del staged
    cuda.streams["out"].work()
    gc.collect()
    assert len(cuda.runtime.registered) == 1


def test_memory_that_servers_read_is_pinned_on_both_sides():
    cuda, memory = RecordedCuda(), DoubleMemory()
    staging = Staging(1 << 16, memory, CudaCopy(CPU, cuda))
    for step in range(4):
        with cuda.recording():
            staged = staging.fill(PolicyVersion(step), [("w", torch.full((100,), float(step)))])
        cuda.streams["out"].work()
    assert len(cuda.runtime.asked) == 2  # of each of the two in turn

    reading = RecordedCuda()
    copy = CudaCopy(CPU, reading)
    reader = KeptReader(lambda region: copy.pin(region, read_only=True))
    for _ in range(2):
        with reader.reading(staged.place) as (content,):
            assert content.view(np.float32).tolist() == [3.0] * 100
    assert len(reading.runtime.asked) == 1
    assert reading.runtime.asked[0][1] & 0x08  # it is mapped for reading alone
    del content
    reader.close()
    gc.collect()
    assert reading.runtime.registered == {}


def test_memory_that_may_not_be_pinned_is_used_as_it_is_and_told_of_once(caplog):
    cuda, memory = RecordedCuda(error=2), KeptMemory()
    copy = CudaCopy(CPU, cuda)
    assert memory.begin()
    for index in range(3):
        copy.pin(memory.allocate(index, 100))
    assert [record.getMessage() for record in caplog.records] == [
        "4096 bytes are not pinned (cudaHostRegister: error 2): copied more slowly"
    ]
    assert len(cuda.runtime.asked) == 1
