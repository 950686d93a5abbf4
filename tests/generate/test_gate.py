"""The gate of requests: who comes in, who waits, and when it counts as empty."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.generate.gate import GatedPolicy, RequestGate

LONG = 30.0  # seconds; no wait here lasts


class Answering:
    """A policy that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.free = asyncio.Event()

    async def generate(self, input_ids, sampling, n, name=None, *, fails=False):
        self.asked.append(name)
        await self.free.wait()
        if fails:
            raise RuntimeError("lost")
        return [name]

    async def abort(self, request_id=""):
        self.free.set()


REQUEST: tuple[list[int], dict[str, int], int] = ([1, 2], {}, 1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_closed_gate_holds_new_requests_back_and_waits_for_those_inside():
    async def run():
        policy, gate = Answering(), RequestGate()
        gated = GatedPolicy(policy, gate)
        first = asyncio.create_task(gated.generate(*REQUEST, "first"))
        await settle()
        closing = asyncio.create_task(gate.close(LONG))
        await settle()
        second = asyncio.create_task(gated.generate(*REQUEST, "second"))
        await settle()
        assert policy.asked == ["first"]
        assert not closing.done()
        policy.free.set()
        await closing
        assert (await first, gate.inside, second.done()) == (["first"], 0, False)
        gate.open()
        assert await second == ["second"]

    asyncio.run(run())


def test_a_request_that_fails_or_is_given_up_leaves_the_gate():
    async def run():
        policy, gate = Answering(), RequestGate()
        gated = GatedPolicy(policy, gate)
        failing = asyncio.create_task(gated.generate(*REQUEST, "failing", fails=True))
        given_up = asyncio.create_task(gated.generate(*REQUEST, "given up"))
        await settle()
        assert gate.inside == 2
        given_up.cancel()
        await gated.abort()
        with pytest.raises(RuntimeError, match="lost"):
            await failing
        await gate.close(LONG)
        waiting = asyncio.create_task(gated.generate(*REQUEST, "waiting"))
        await settle()
        waiting.cancel()
        await settle()
        assert gate.inside == 0

    asyncio.run(run())


def test_a_request_that_is_ended_by_its_id_while_it_waits_has_no_answer_and_never_comes_in():
    async def run():
        policy, gate = Answering(), RequestGate()
        gated = GatedPolicy(policy, gate)
        await gate.close(LONG)
        waiting = [asyncio.create_task(gated.generate(*REQUEST, name)) for name in ("ended", "other", None)]
        await settle()
        await gated.abort("ended")
        await settle()
        assert [each.done() for each in waiting] == [True, False, False]
        gate.open()
        assert await asyncio.gather(*waiting) == [[], ["other"], [None]]
        assert (policy.asked, gate.inside) == (["other", None], 0)

    asyncio.run(run())


def test_a_gate_that_does_not_become_empty_in_time_stays_closed_until_it_is_opened():
    async def run():
        gate = RequestGate()
        async with gate.pass_():
            with pytest.raises(TimeoutError):
                await gate.close(0.01)
            assert not gate.is_open
            gate.open()
            async with gate.pass_():
                assert gate.inside == 2
        await gate.close(0.01)

    asyncio.run(run())
