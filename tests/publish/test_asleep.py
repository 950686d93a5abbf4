"""A real SGLang server that has lent its device to the learner: it takes versions in, and draws nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.pauses import Pauses, Reason
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.sources import make_source
from streamrl.publish.staging import Staging
from streamrl.publish.transport import Sink, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.drawing import Drawing

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPT = [1, 4, 2, 8]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
SHORT = {**SAMPLING, "max_new_tokens": 2}
QUIET = 3.0  # seconds in which an awake server answers a short request, also on a busy machine


async def publish(source: Source, sink: Sink, folder: Path, step: int) -> None:
    staged = Staging(1 << 16).fill(PolicyVersion(step), load_file(folder / "model.safetensors").items())
    manifest = source.manifest(STATE, staged)
    sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
    await asyncio.gather(sending, sink.apply(staged.version, manifest))


def test_a_version_that_comes_while_a_server_sleeps_wakes_nobody(fresh_server, model_folders, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": model_folders[0]}, "publish": {"transport": "disk"}})

    async def run() -> tuple[Answer, Answer]:
        client, gate = EngineClient(fresh_server.address, TIMEOUT), RequestGate()
        pauses = Pauses(client, TIMEOUT)
        policy, sink = GatedPolicy(client, gate), make_sink(config, client, gate, pauses=pauses)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        try:
            early = Drawing(policy, PROMPT, SAMPLING)
            await early.goes_on()
            await pauses.begin(Reason.ASLEEP, "retract")
            await publish(source, sink, model_folders[1], 1)
            assert (await client.model_info()).weight_version == "1.0"
            late = asyncio.create_task(policy.generate(PROMPT, SHORT, 1))
            await asyncio.wait((late,), timeout=QUIET)
            assert not early.is_whole
            assert not late.done()
            await pauses.end(Reason.ASLEEP)
            return await early.whole(), (await late)[0]
        finally:
            await client.close()

    early, late = asyncio.run(run())
    assert [span.version for span in early.meta_info.weight_versions] == ["0.0", "1.0"]
    assert [span.version for span in late.meta_info.weight_versions] == ["1.0"]
    assert (len(early.output_ids), len(late.output_ids)) == (300, 2)


def test_a_server_that_is_woken_during_an_update_goes_on_when_that_has_ended(fresh_server, model_folders) -> None:
    async def run() -> Answer:
        client = EngineClient(fresh_server.address, TIMEOUT)
        pauses = Pauses(client, TIMEOUT)
        try:
            await pauses.begin(Reason.ASLEEP, "retract")
            await pauses.begin(Reason.UPDATE, "retract")
            asked = asyncio.create_task(client.generate(PROMPT, SHORT, 1))
            await pauses.end(Reason.ASLEEP)
            await asyncio.wait((asked,), timeout=QUIET)
            assert not asked.done()
            await pauses.end(Reason.UPDATE)
            return (await asked)[0]
        finally:
            await client.close()

    assert len(asyncio.run(run()).output_ids) == 2
