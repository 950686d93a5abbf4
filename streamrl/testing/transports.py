"""What a publish transport must do: every bit arrives, on a real SGLang server, and what cannot be received is refused.

from streamrl.testing.transports import TransportConformance

class TestFetched(TransportConformance):
    name = "fetched.py:Fetched"
    model = Path("/path/to/models/tiny")
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.publish.transport import PublishError, Sink
from streamrl.publish.transports import transport_of
from streamrl.publish.transports.base import Costs
from streamrl.stream.messages import ServerState
from streamrl.testing.declarations import Conformance
from streamrl.types import PolicyVersion

TIMEOUT = 60.0  # seconds of one call to the server
START = 300.0  # seconds; SGLang imports for 15 s on a quiet machine and for more than a minute on a busy one


class TransportConformance(Conformance):
    """Give `name`, and what else the section `publish` needs, such as its own options."""

    kind = TRANSPORTS
    settings: ClassVar[dict[str, Any]] = {}
    model: ClassVar[Path] = Path("models/tiny")  # a Hugging Face folder, small
    address = ""  # of a server that has this model; empty: one is started

    def test_a_plan_can_count_with_it(self) -> None:
        transport = transport_of(self._config())
        assert transport.staged_copies >= 1
        assert transport.server_copies >= 0
        for servers in (1, 9):
            costs = Costs(
                copy=1.0, move=1.0, pageable=4.0, network=2.0, across=2.0, read=3.0, scan=0.5, hash=0.5, verify=0.5,
                changed=0.1, servers=servers, at_once=1, beside=True,
            )  # fmt: skip
            times = transport.times(costs)
            assert all(math.isfinite(each) and each >= 0 for each in (times.copy, times.pause, times.round))

    def test_a_worker_without_torch_can_make_a_sink(self) -> None:
        code = (
            "import sys; from unittest import mock; from streamrl.config import Config\n"
            "from streamrl.publish.transport import ServerEnd\n"
            "from streamrl.publish.transports import transport_of\n"
            f"config = Config.model_validate_json({self._config().model_dump_json()!r})\n"
            "server = mock.Mock(address='http://127.0.0.1:1')\n"
            "other = dict.fromkeys(('client', 'update', 'loading', 'keys'), server)\n"
            "end = ServerEnd(stream=config.stream, timeout=1.0, **other)\n"
            "transport_of(config).sink(end)\n"
            "assert 'torch' not in sys.modules, 'the sink imports torch, which a worker does without'"
        )
        environment = {"PYTHONPATH": ":".join(path or "." for path in sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    def test_versions_arrive_bit_by_bit_and_a_broken_manifest_touches_nothing(self, tmp_path: Path) -> None:
        asyncio.run(self._publish(tmp_path))

    async def _publish(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        from streamrl.generate.gate import RequestGate
        from streamrl.generate.weight_sinks import make_sink
        from streamrl.publish.sources import make_source, make_staging
        from streamrl.stream.keys import key_folder, service_keys

        config = self._config()
        keys = key_folder(config, folder)
        service_keys(keys)  # the replay service of a run makes them
        weights = [load_file(self.model / "model.safetensors")]
        weights += [{name: tensor * factor for name, tensor in weights[0].items()} for factor in (0.5, 2.0)]
        staging, state = make_staging(config), ServerState(name="server-0", version=PolicyVersion(0))
        async with self._server(config, folder) as client:
            before = await client.weights_checksum()
            with contextlib.closing(make_source(config, folder, "tcp://127.0.0.1:1")) as source:
                sink = make_sink(config, client, RequestGate(), keys=keys)
                try:
                    await sink.apply(PolicyVersion(9), {"transport": "none such"})
                    raise AssertionError("a manifest that says nothing was applied")
                except PublishError:
                    assert await client.weights_checksum() == before
                for step, tensors in enumerate(weights[1:], 1):
                    staged = staging.fill(PolicyVersion(step), tensors.items())
                    manifest = source.manifest(state, staged)
                    await _together(sink, staged, manifest, lambda s=staged: source.send(state, s, _nothing))
                    arrived = await client.weights_checksum()
                    assert (await client.model_info()).weight_version == str(staged.version)
                    same = folder / f"same-{step}"
                    same.mkdir()
                    save_file(tensors, same / "model.safetensors", metadata={"format": "pt"})
                    await client.update_from_disk(str(same), str(staged.version))
                    assert await client.weights_checksum() == arrived != before, f"version {step} arrived otherwise"

    def _config(self) -> Config:
        publish = {"transport": self.name, "timeout": TIMEOUT, "bucket": 1 << 16} | self.settings
        return Config.model_validate({"model": {"path": self.model.resolve()}, "publish": publish})

    @contextlib.asynccontextmanager
    async def _server(self, config: Config, folder: Path) -> AsyncIterator[EngineClient]:
        from streamrl.engine.server import Server

        started = None if self.address else Server(config, folder, index=0)
        client = EngineClient(started.address if started else self.address, TIMEOUT)
        try:
            if started:
                await started.ready(client, START)
            yield client
        finally:
            await client.close()
            if started:
                await started.stop()


async def _together(sink: Sink, staged: Any, manifest: dict[str, Any], send: Any) -> None:
    """The learner sends while the worker receives, as in a run."""
    await asyncio.gather(asyncio.to_thread(send), sink.apply(staged.version, manifest))


def _nothing() -> None:
    """What a source calls while it waits: nobody stops it here."""
