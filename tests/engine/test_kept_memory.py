"""Memory that outlives versions: what readers see, what holds the writer off, and what is left of it afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import xxhash

from streamrl.engine import memory_loader
from streamrl.engine.kept_memory import (
    DoubleMemory,
    KeptMemory,
    KeptReader,
    Place,
    SingleMemory,
    Unreadable,
    check_readable,
)
from streamrl.engine.load_plan import BucketLayout, LoadPlan, Receipt, Receipts, write_receipt
from streamrl.engine.memory_loader import load_plan

DEADLINE = 60.0  # seconds


def write(memory: KeptMemory | SingleMemory | DoubleMemory, *contents: int, size: int = 10_000) -> Place:
    memory.begin()
    for index, content in enumerate(contents):
        memory.allocate(index, size)[:] = content
    return memory.finish()


def read(reader: KeptReader, place: Place) -> list[int]:
    """The one value of each bucket."""
    with reader.reading(place) as buckets:
        assert all((bucket == bucket[0]).all() for bucket in buckets)
        return [int(bucket[0]) for bucket in buckets]


def hold(place: Place, words: Connection) -> None:
    """A reader that says what it reads, and stays inside until it is told to look again."""
    with KeptReader().reading(place) as (bucket,):
        words.send(int(bucket[0]))
        words.recv()
        words.send((int(bucket.min()), int(bucket.max())))


@pytest.fixture
def holding() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    processes: list[multiprocessing.process.BaseProcess] = []
    yield processes
    for process in processes:
        process.kill()
        process.join(DEADLINE)


def start_holding(place: Place, holding: list) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(place, theirs))
    process.start()
    holding.append(process)
    assert ours.poll(DEADLINE)
    return process, ours


def test_readers_see_what_was_written_and_keep_their_map_from_version_to_version():
    memory, reader = KeptMemory(), KeptReader()
    first = write(memory, 1, 2)
    assert read(reader, first) == [1, 2]
    second = write(memory, 3, 4)
    with reader.reading(second) as again:
        assert [int(bucket[0]) for bucket in again] == [3, 4]
        assert len(reader._opened) == 1
    assert second.offsets == first.offsets
    with pytest.raises(Unreadable, match="holds content 2, announced was 1"):
        read(reader, first)
    memory.close()


def test_a_bucket_that_grows_moves_and_the_others_stay():
    memory, reader = KeptMemory(), KeptReader()
    first = write(memory, 1, 2)
    memory.begin()
    memory.allocate(0, 50_000)[:] = 3
    memory.allocate(1, 10_000)[:] = 4
    second = memory.finish()
    assert read(reader, second) == [3, 4]
    assert (second.offsets[0] != first.offsets[0], second.offsets[1]) == (True, first.offsets[1])
    memory.close()


def test_what_is_half_written_cannot_be_read():
    memory, reader = KeptMemory(), KeptReader()
    place = write(memory, 1)
    read(reader, place)
    memory.begin()
    with pytest.raises(Unreadable, match="is being written again"):
        read(reader, place)
    memory.allocate(0, 10_000)[:5_000] = 2
    with pytest.raises(Unreadable):
        read(KeptReader(), place)
    memory.close()


@pytest.mark.parametrize("kind", [SingleMemory, DoubleMemory])
def test_a_hung_reader_keeps_its_bytes_while_the_versions_go_on(kind: type[SingleMemory] | type[DoubleMemory], holding):
    memory = kind()
    place = write(memory, 7)
    process, words = start_holding(place, holding)
    assert words.recv() == 7
    os.kill(process.pid, signal.SIGSTOP)
    reader = KeptReader()
    for content in (8, 9, 10, 11):
        assert read(reader, write(memory, content)) == [content]
    os.kill(process.pid, signal.SIGCONT)
    words.send("look again")
    assert words.poll(DEADLINE)
    assert words.recv() == (7, 7)
    memory.close()


def test_a_killed_reader_lets_go(holding):
    memory = KeptMemory()
    process, _ = start_holding(write(memory, 7), holding)
    assert not memory.begin()
    process.kill()
    process.join(DEADLINE)
    assert memory.begin()
    memory.close()


def test_two_memories_are_written_in_turn_and_used_again():
    memory, reader = DoubleMemory(), KeptReader()
    places = [write(memory, content) for content in range(6)]
    assert [place.token for place in places] == [places[0].token, places[1].token] * 3
    assert (read(reader, places[-2]), read(reader, places[-1])) == ([4], [5])
    memory.close()


def test_one_memory_is_used_again():
    memory, reader = SingleMemory(), KeptReader()
    first, second = write(memory, 1), write(memory, 2)
    assert first.token == second.token
    assert read(reader, second) == [2]
    with pytest.raises(Unreadable):
        read(reader, first)
    memory.close()


def test_nothing_has_a_name_and_a_reader_that_comes_late_is_told():
    before = set(Path("/dev/shm").iterdir())
    memory = KeptMemory()
    place = write(memory, 1)
    check_readable(place)
    assert not any("streamrl" in path.name for path in set(Path("/dev/shm").iterdir()) - before)
    memory.close()
    with pytest.raises(Unreadable):
        check_readable(place)
    other = KeptMemory()  # takes the number that the first one had
    with pytest.raises(Unreadable):
        check_readable(place)
    other.close()


class Model:
    """Takes weights as a model of SGLang's does; fails at the tensor that is called `bad`."""

    def __init__(self) -> None:
        self.weights: dict = {}

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "bad":
                raise KeyError(name)
            self.weights[name] = tensor.clone()


def plan_of(place: Place, receipts: Receipts, names: tuple[str, str] = ("a", "b"), checksum: str = "") -> LoadPlan:
    data = np.full(10_000, 1, np.uint8)
    layout = BucketLayout(
        names=names,
        dtypes=("float32", "bfloat16"),
        shapes=((50, 40), (1000,)),
        bytes=10_000,
        checksum=checksum or xxhash.xxh3_64_hexdigest(data.data),
    )
    return LoadPlan(place=place, buckets=(layout,), verify=True, receipt=receipts.path, token=receipts.token, rank=1)


def test_the_loader_copies_the_tensors_and_every_outcome_is_a_receipt():
    import torch

    memory, receipts, reader, model = KeptMemory(), Receipts(2), KeptReader(), Model()
    plan = plan_of(write(memory, 1), receipts)
    assert load_plan(model, plan, reader) == Receipt(status="loaded")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.weights.items()} == {
        "a": (torch.float32, (50, 40)),
        "b": (torch.bfloat16, (1000,)),
    }
    assert (model.weights["a"].view(torch.uint8) == 1).all()
    write_receipt(plan, Receipt(status="failed", reason="ü\n\x01" * 5000))
    none, told = receipts.read()
    assert (none, told.status, told.reason[:4]) == (None, "failed", "? \x01?")

    model = Model()
    refused = load_plan(model, plan_of(plan.place, receipts, checksum="0" * 16), reader)
    assert (refused.status, model.weights) == ("refused", {})
    assert "announced was 0000000000000000" in refused.reason
    failed = load_plan(model, plan_of(plan.place, receipts, names=("a", "bad")), reader)
    assert (failed.status, failed.reason) == ("failed", "KeyError: 'bad'")
    write(memory, 2)
    assert load_plan(Model(), plan, reader).status == "stale"
    assert memory.begin()  # no outcome has left a lock behind
    receipts.close()
    memory.close()


def test_a_late_receipt_of_a_former_try_is_no_news_though_its_path_is_a_new_ones():
    place = Place(path="", token="", sequence=0, offsets=(), sizes=())
    former = Receipts(2)
    late = plan_of(place, former)
    former.close()
    receipts = Receipts(2)
    plan = plan_of(place, receipts)
    assert plan.receipt == late.receipt  # the kernel gives the lowest descriptor that is free
    write_receipt(late, Receipt(status="stale", reason="r" * 100))
    assert list(receipts.read()) == [None, None]
    write_receipt(plan, Receipt(status="loaded"))
    assert list(receipts.read()) == [None, Receipt(status="loaded")]
    write_receipt(late, Receipt(status="stale"))
    assert list(receipts.read()) == [None, None]  # as if the rank had written none: the load is tried again
    receipts.close()


def test_what_a_server_maps_is_pinned_for_its_device_once_a_memory(monkeypatch):
    import msgspec

    memory, receipts, pinned = KeptMemory(), Receipts(2), []
    copying = memory_loader._copying()
    monkeypatch.setattr(type(copying), "pin", lambda copy, region, read_only: pinned.append((len(region), read_only)))
    for number in (1, 1):
        plan = plan_of(write(memory, number), receipts)
        model = Model()
        memory_loader.load(model, [(msgspec.json.encode(plan).decode(), None)])
        assert list(receipts.read())[1] == Receipt(status="loaded")
        assert set(model.weights) == {"a", "b"}
    assert pinned == [(10_000, True)]
    memory_loader._reader.close()
    receipts.close()
    memory.close()
