"""The staging copy: bitwise, aligned, bounded."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.device_copy import CpuCopy, CudaCopy
from streamrl.publish import staging as staging_module
from streamrl.publish.staging import Staging
from streamrl.types import PolicyVersion
from tests.recorded_cuda import RecordedCuda

VERSION = PolicyVersion(3)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 16, generator=generator),
        "odd": torch.randn(3, generator=generator).bfloat16(),
        "half": torch.randn(5, 8, generator=generator).bfloat16(),
        "norm": torch.randn(16, generator=generator),
        "turned": torch.randn(8, 6, generator=generator).T,
        "scalar": torch.tensor(2.5),
    }


def test_staged_tensors_are_bitwise_those_that_were_offered():
    tensors = weights(0)
    staged = Staging(1 << 20).fill(VERSION, tensors.items())
    assert dict(staged.tensors()).keys() == tensors.keys()
    for name, tensor in staged.tensors():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


def test_every_tensor_lies_at_a_multiple_of_its_item_size():
    staged = Staging(1 << 20).fill(VERSION, weights(0).items())
    assert len(staged.buckets) > 1  # six bytes of bfloat16 come before a float32
    for bucket in staged.buckets:
        start = 0
        for _, tensor in bucket.tensors():
            assert start % tensor.itemsize == 0
            start += tensor.nbytes
        assert start == bucket.layout.bytes == len(bucket.data)


def test_a_bucket_is_no_larger_than_allowed_unless_one_tensor_is():
    staged = Staging(256).fill(VERSION, weights(0).items())
    for bucket in staged.buckets:
        assert bucket.layout.bytes <= 256 or len(bucket.layout.names) == 1


def test_the_memory_of_one_version_serves_the_next():
    staging = Staging(256)
    first = staging.fill(VERSION, weights(0).items())
    places = [bucket.data.data_ptr() for bucket in first.buckets]
    checksums = [layout.checksum for layout in first.layouts(checksums=True)]
    second = staging.fill(PolicyVersion(4), weights(1).items())
    assert [bucket.data.data_ptr() for bucket in second.buckets] == places
    assert [layout.checksum for layout in second.layouts(checksums=True)] != checksums
    assert all(torch.equal(tensor, weights(1)[name]) for name, tensor in second.tensors())


def test_a_copy_does_not_follow_the_weights():
    tensor = torch.zeros(4)
    staged = Staging(256).fill(VERSION, [("w", tensor)])
    tensor.add_(1)
    assert dict(staged.tensors())["w"].sum() == 0


def test_a_name_that_comes_twice_and_no_tensor_at_all_are_refused():
    with pytest.raises(ValueError, match=r"version 3\.0: tensor w comes twice"):
        Staging(256).fill(VERSION, [("w", torch.zeros(2)), ("w", torch.zeros(2))])
    with pytest.raises(ValueError, match="no tensors"):
        Staging(256).fill(VERSION, [])


def test_memory_that_was_left_to_a_reader_keeps_what_is_in_it():
    staging = Staging(256)
    first = staging.fill(VERSION, weights(0).items())
    staging.leave()
    staging.fill(PolicyVersion(4), weights(1).items())
    assert all(torch.equal(tensor, weights(0)[name]) for name, tensor in first.tensors())


def test_checksums_are_computed_when_somebody_compares_them_and_once(monkeypatch):
    hashed: list[int] = []
    plain = staging_module.bucket_checksum
    monkeypatch.setattr(staging_module, "bucket_checksum", lambda data: hashed.append(len(data)) or plain(data))
    staged = Staging(256).fill(VERSION, weights(0).items())
    assert {layout.checksum for layout in staged.layouts(checksums=False)} == {""}
    assert hashed == []
    layouts = staged.layouts(checksums=True)
    assert staged.layouts(checksums=True) is layouts
    assert hashed == [bucket.layout.bytes for bucket in staged.buckets]
    assert [layout.checksum for layout in layouts] == [
        xxhash.xxh3_64_hexdigest(bucket.data.numpy()) for bucket in staged.buckets
    ]


class SmallPages(mmap.mmap):
    """Memory of a kernel without large pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_large_pages_has_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    staged = Staging(256).fill(VERSION, weights(0).items())
    assert all(torch.equal(tensor, weights(0)[name]) for name, tensor in staged.tensors())


KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
TENSORS = st.lists(st.tuples(KINDS, st.lists(st.integers(0, 5), max_size=3), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=150)
@given(described=TENSORS, limit=st.integers(1, 200), gpu=st.booleans(), data=st.data())
def test_any_tensors_in_any_buckets_arrive_whole_once_their_copy_has_ended(described, limit, gpu, data):
    generator = torch.Generator().manual_seed(0)
    named = []
    for number, (kind, shape, turned) in enumerate(described):
        tensor = torch.randint(-100, 100, shape, generator=generator).float().to(kind)
        named.append((f"w{number}", tensor.T if turned and tensor.ndim == 2 else tensor))
    stays = [tensor for _, tensor in named if data.draw(st.booleans())]
    resident = {tensor.untyped_storage().data_ptr() for tensor in stays}
    cuda = RecordedCuda()
    staging = Staging(limit, copy=CudaCopy(torch.device("cpu"), cuda) if gpu else CpuCopy())
    with cuda.recording():
        staged = staging.fill(VERSION, named, resident)
    assert staged.copied.is_done() is not gpu
    cuda.streams.get("out", cuda.streams["compute"]).work()
    assert staged.copied.is_done()
    for (name, tensor), (wanted, original) in zip(staged.tensors(), named, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (wanted, original.dtype, original.shape)
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), original.contiguous().view(-1).view(torch.uint8)
        )
    for bucket in staged.buckets:
        assert bucket.layout.bytes <= limit or len(bucket.layout.names) == 1
        assert len(bucket.data) == bucket.layout.bytes
