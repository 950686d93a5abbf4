"""A further node of a server over several: it runs that node's ranks, as the server's worker says (`engine/nodes.py`).

each Meeting ─▶ SGLang with this node's rank, in the place of the former one
the worker has left ─▶ SGLang ends ─▶ the worker's exit code
SIGTERM ─▶ SGLang ends ─▶ exit 0
no word of the worker for as long as a role waits for a learner step ─▶ SGLang ends ─▶ exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from pathlib import Path

import uvloop

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.device_map import divide
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.engine.nodes import Meeting, NodeOf, NodeRole, State
from streamrl.engine.server import Server, ServerFailed
from streamrl.generate.served import engine_keys, server_label

log = logging.getLogger(__name__)

POLL = 0.5  # seconds between two looks at the worker's file and at the process


def main(config: Config, run_folder: Path, index: int, rank: int) -> int:
    """Node `rank` of the server of worker `index`, until the worker has left. Returns the exit code.

    Raises ConfigError for a node that this server does not have.
    """
    own = config.of_worker(index)
    nodes = own.generate.server_nodes
    if not 0 < rank < nodes:
        raise ConfigError(
            f"--node: {rank} is none of a server with generate.server_nodes={nodes}; allowed: 0 to {nodes - 1}"
        )
    return uvloop.run(run_node(own, run_folder, index, rank))


async def run_node(config: Config, run_folder: Path, index: int, rank: int) -> int:
    """`main` on an event loop; `config` as worker `index` sees it."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    node = NodeRole(run_folder, f"server-{server_label(config, index)}", rank, time.monotonic())
    server: Server | None = None
    try:
        while not stop.is_set():
            now = time.monotonic()
            if (code := node.over(now)) is not None:
                return code
            if node.silence(now) > config.progress_timeout:
                worker, waited = f"generator-{index}", config.progress_timeout
                print(f"{worker}, node {rank}: the worker has reported nothing in {waited:g} s", file=sys.stderr)
                return 1
            if (meeting := node.to_join(now)) is not None:
                if server is not None:
                    await server.stop()
                server = _joined(config, run_folder, index, rank, meeting)
                node.joined(meeting, now)
            elif server is not None and node.state is State.JOINED:
                _check_server(server, node, now)
            node.beat(now)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL)
    finally:
        node.leave(time.monotonic())
        if server is not None:
            await server.stop()
    return 0


def _joined(config: Config, run_folder: Path, index: int, rank: int, meeting: Meeting) -> Server:
    """This node's part of a new start of the server."""
    label = f"{server_label(config, index)}-node-{rank}"
    gpus = divide(visible_gpus(), config.generate)[0] if has_cuda() else ()
    node = NodeOf(rank, config.generate.server_nodes, meeting.address)
    log.info("joins the server at %s", meeting.address)
    return Server(config, run_folder, index, engine_keys(config, run_folder), label=label, gpus=gpus, node=node)


def _check_server(server: Server, node: NodeRole, now: float) -> None:
    try:
        server.check()
    except ServerFailed as failure:
        log.warning("%s", failure)
        node.ended(str(failure), now)
