"""One set of SGLang servers for many runs: started once, started again only for runs that need other ones.

A run attaches to them (`generate.attach`), and its worker brings them back to the model's initial weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.device_map import device_map
from streamrl.engine.client import EngineClient
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.engine.server import Server, server_arguments, server_environment
from streamrl.generate.served import engine_keys
from streamrl.preflight.machine import check_served

log = logging.getLogger(__name__)

START_SHARE = 0.9  # of run.start_timeout, as for a server that a worker starts


class SharedServers:
    """The servers of a sweep. `stop` them, whatever happens.

    Usage:
        servers = SharedServers(sweep_folder)
        servers.addresses(config)  # ['http://127.0.0.1:40123']
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kind: str | None = None
        self._servers: list[Server] = []

    def addresses(self, config: Config) -> list[str]:
        """All that a run with `config` needs, ready; empty where such a run has to start its own ones.

        Raises ServerFailed.
        """
        kind = server_kind(config)
        if kind is None:
            self.stop()  # the run's own are placed on the same GPUs
            return []
        if kind != self._kind or any(server.exit_code is not None for server in self._servers):
            self.stop()
            if has_cuda():
                check_served(config)
            keys = engine_keys(config, self._folder)
            placed = device_map(config, len(gpus := visible_gpus())).workers if has_cuda() else ()
            shares = [tuple(gpus[position] for position in server) for worker in placed for server in worker]
            for index in range(server_count(config)):
                self._servers.append(Server(config, self._folder, index, keys, gpus=shares[index] if shares else ()))
            asyncio.run(self._ready(config))
            self._kind = kind
        return [server.address for server in self._servers]

    def stop(self) -> None:
        """End them; the next run that needs servers gets new ones. May be called twice."""
        while self._servers:
            asyncio.run(self._servers[-1].stop())
            self._servers.pop()
        self._kind = None

    async def _ready(self, config: Config) -> None:
        keys = engine_keys(config, self._folder)
        for server in self._servers:
            client = EngineClient(server.address, config.request_timeout, keys)
            try:
                await server.ready(client, START_SHARE * config.run.start_timeout)
            finally:
                await client.close()


def server_kind(config: Config) -> str | None:
    """What two runs must agree on to use the same servers; None where a run cannot share any.

    The seed is not part of it: which request a server answers first is a matter of time, so no seed repeats a run.
    Servers of different pools, those given by `generate.attach`, those that keep a run's adapters, and those that the
    rules of `generate.attach` refuse are not shared.
    """
    if config.generate.pools or config.generate.attach or config.learner.lora.by_adapter or not _may_attach(config):
        return None
    arguments = {key: value for key, value in server_arguments(config, 0).items() if key != "random_seed"}
    of_process = [server_environment(config), config.generate.threads, server_count(config)]
    return json.dumps([arguments, *of_process], sort_keys=True, default=str)


def _may_attach(config: Config) -> bool:
    """Could the run be given its servers? As each role reads its configuration, and asks its rules."""
    tree = config_file.as_tree(config)
    tree["generate"]["attach"] = [f"http://127.0.0.1:{1 + index}" for index in range(server_count(config))]
    try:
        config_file.checked(tree)
    except ConfigError:
        return False
    return True


def server_count(config: Config) -> int:
    """SGLang servers of all workers, where there is one pool."""
    return config.workers * config.generate.servers
