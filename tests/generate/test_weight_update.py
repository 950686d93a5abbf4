"""What an update that fails leaves behind: by a client that only plays a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from streamrl.config.publish import PublishConfig
from streamrl.engine.answers import ModelInfo
from streamrl.engine.client import EngineError
from streamrl.engine.kept_memory import Place
from streamrl.engine.load_plan import LOADER, Receipt, Receipts
from streamrl.generate.gate import RequestGate
from streamrl.generate.kept_loading import KeptLoading
from streamrl.generate.weight_update import WeightUpdate
from streamrl.publish.disk_sink import DiskSink
from streamrl.publish.transport import DiskManifest, PublishError
from streamrl.types import PolicyVersion

REFUSED = EngineError("http://s", "/pause_generation", 500, "no")
LATE = EngineError("http://s", "/pause_generation", None, "none in 60 s", late=True)


class Unwilling:
    """A server that does not say that it pauses, and may not say that it goes on."""

    def __init__(self, error: EngineError, *, goes_on: bool) -> None:
        self.error, self.goes_on = error, goes_on
        self.told: list[str] = []

    async def pause(self, mode: str, timeout: float) -> None:
        self.told.append("pause")
        raise self.error

    async def resume(self, timeout: float) -> None:
        self.told.append("resume")
        if not self.goes_on:
            raise self.error

    async def abort(self, request_id: str = "", timeout: float | None = None) -> None: ...


def updated(client: Unwilling, interruption: str, *, whole: bool = True) -> RequestGate:
    """The gate behind an update that does not come to its weights."""
    gate = RequestGate()

    async def run() -> None:
        update = WeightUpdate(client, gate, PublishConfig.model_validate({"interruption": interruption}))
        update.whole = whole
        with pytest.raises(EngineError):
            async with update.waiting():
                raise AssertionError("the server is not paused")

    asyncio.run(run())
    return gate


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("error", [REFUSED, LATE])
@pytest.mark.parametrize("interruption", ["drain", "abort", "retract", "in_place"])
def test_a_server_that_cannot_be_paused_goes_on_with_its_requests(interruption: str, error: EngineError, goes_on: bool):
    client = Unwilling(error, goes_on=goes_on)
    gate = updated(client, interruption)
    assert client.told == ["pause", "resume"]  # it may have paused, and said so too late

    async def passes() -> None:
        async with asyncio.timeout(20), gate.pass_():
            assert gate.inside == 1

    asyncio.run(passes())


def test_a_server_with_parts_of_two_versions_that_cannot_be_paused_takes_no_requests():
    client = Unwilling(REFUSED, goes_on=True)
    assert not updated(client, "drain", whole=False).is_open
    assert client.told == ["pause"]


class Timed:
    """A server of which is known how long it may take for a name."""

    address = "http://s"

    def __init__(self) -> None:
        self.named: list[tuple[str, float]] = []

    async def server_info(self, timeout: float) -> dict[str, Any]:
        return {"custom_weight_loader": [LOADER]}

    async def model_info(self, timeout: float) -> ModelInfo:
        return ModelInfo(weight_version="0.0", model_path="")

    async def begin_weight_update(self, timeout: float) -> None: ...

    async def update_from_tensor(self, payloads: list[str], **_: Any) -> None: ...

    async def update_from_disk(self, *_: Any, **__: Any) -> None:
        raise REFUSED

    async def end_weight_update(self, timeout: float) -> None: ...

    async def update_weight_version(self, version: str, timeout: float) -> None:
        self.named.append((version, timeout))


class AtOnce:
    """An update for which no request has to wait."""

    whole = flush_cache = True

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        yield


@pytest.mark.parametrize(("status", "name"), [("loaded", "1.0"), ("refused", "0.0")])
def test_a_server_has_no_longer_for_a_name_than_for_other_calls_of_an_update(
    status: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    def told(_: Receipts) -> Iterator[Receipt]:
        yield Receipt(status=status)

    monkeypatch.setattr(Receipts, "read", told)
    client = Timed()
    loading = KeptLoading(client, AtOnce(), 7.0, 1)
    place = Place(path="", token="", sequence=0, offsets=(), sizes=())
    with contextlib.suppress(EngineError):
        asyncio.run(loading.load(PolicyVersion(1), place, (), False))
    assert client.named == [(name, 7.0)]


def test_a_server_with_parts_of_two_versions_has_no_longer_for_a_name_either(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.publish.disk_sink._check", lambda plan: None)
    client = Timed()
    manifest = msgspec.to_builtins(DiskManifest(folder="", checksum=""))
    with pytest.raises(PublishError):
        asyncio.run(DiskSink(client, AtOnce(), 7.0).apply(PolicyVersion(1), manifest))
    assert client.named == [("1.0-partial", 7.0)]
