"""What an update that fails leaves behind: by a client that only plays a server."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config.publish import PublishConfig
from streamrl.engine.client import EngineError
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_update import WeightUpdate

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
