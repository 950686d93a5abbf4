"""How many ranks of a server join a weight update: as configured for our own, as they say for attached ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.device import Device
from streamrl.engine.client import EngineClient
from streamrl.engine.server import ServerFailed
from streamrl.generate.served import ServedModel, check_draws, joining_ranks
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staging
from streamrl.types import PolicyVersion

TIMEOUT = 60.0


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ({"tp_size": 1, "pp_size": 1, "dp_size": 1}, 1),
        ({"tp_size": 16, "nnodes": 2, "pp_size": 1, "dp_size": 1}, 16),
        ({"tp_size": 8, "ep_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({}, 1),
    ],
)
def test_the_ranks_of_tensor_parallelism_join_over_as_many_nodes_as_there_are(arguments, ranks):
    assert joining_ranks(arguments, "http://a:1") == ranks


@pytest.mark.parametrize("arguments", [{"tp_size": 4, "pp_size": 2}, {"tp_size": 4, "dp_size": 2}])
def test_a_server_whose_ranks_share_numbers_is_refused(arguments):
    with pytest.raises(ServerFailed, match=r"http://a:1 runs with (pp|dp)_size=2.*allowed: tp_size alone"):
        joining_ranks(arguments, "http://a:1")


def test_an_attached_server_with_sampling_of_its_own_is_refused():
    with pytest.raises(
        ServerFailed, match=r"http://a:1 runs with preferred_sampling_params=.*allowed: generate.sampling"
    ):
        check_draws({"preferred_sampling_params": {"repetition_penalty": 1.1}}, 0.0, "http://a:1")
    for arguments in ({}, {"preferred_sampling_params": None}):
        check_draws(arguments, 0.1, "http://a:1")


def test_an_attached_server_that_leaves_out_min_p_is_refused():
    deterministic = {"enable_deterministic_inference": True}
    with pytest.raises(ServerFailed, match=r"which leaves out generate\.sampling\.min_p=0\.1; allowed: 0"):
        check_draws(deterministic, 0.1, "http://a:1")
    check_draws(deterministic, 0.0, "http://a:1")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_an_attached_server_of_two_ranks_gets_versions_whatever_the_configuration_says(
    serving, model_folders, tmp_path, transport
):
    tree = {"model": {"path": model_folders[0]}, "publish": {"timeout": TIMEOUT, "transport": transport}}
    own = Config.model_validate({**tree, "generate": {"tensor_parallel": 2}})

    async def work(address: str) -> None:
        config = Config.model_validate({**tree, "generate": {"attach": [address]}})
        served = ServedModel(config, tmp_path, index=0)
        client = EngineClient(address, TIMEOUT)
        try:
            await served.start()
            assert served.state.world_size == 2
            await publish(served, config, model_folders[1])
            through = (await client.weights_checksum())["per_engine_checksum"]
            await client.update_from_disk(str(model_folders[1]), "2.0")
            assert through == (await client.weights_checksum())["per_engine_checksum"]
        finally:
            await client.close()
            await served.close()

    with serving(own, tmp_path) as server:
        asyncio.run(work(server.address))


async def publish(served: ServedModel, config: Config, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    if config.publish.transport == "memory":
        staging = make_staging(config)  # its memory is gone with it
        staged = staging.fill(PolicyVersion(1), weights.items())
        manifest = make_source(config, Path("/nowhere"), "tcp://127.0.0.1:1").manifest(served.state, staged)
        await served.sink().apply(staged.version, manifest)
        return
    source = BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT)
    try:
        staged = Staging(1 << 16).fill(PolicyVersion(1), weights.items())
        manifest = source.manifest(served.state, staged)
        sending = asyncio.to_thread(source.send, served.state, staged, _poll(time.monotonic() + TIMEOUT))
        await asyncio.gather(sending, served.sink().apply(staged.version, manifest))
    finally:
        source.close()


def _poll(end: float) -> Callable[[], None]:
    def check() -> None:
        assert time.monotonic() < end
        time.sleep(0.002)

    return check
