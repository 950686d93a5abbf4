"""Where a service listens: one that is started again takes the address of the one before, which its peers know."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from streamrl.config import Config
from streamrl.stream.address import read_address
from streamrl.stream.keys import key_folder
from streamrl.stream.sockets import Router

log = logging.getLogger(__name__)

# How an address ends that leaves the port to the operating system.
_FREE_PORT = ":0"


def listen(config: Config, run_folder: Path) -> Router:
    """Bind `replay.address`, with the port that `RUN/replay.address` still tells where any port will do.

    A killed service leaves that file behind. Where its port was taken by another process meanwhile, the new
    service takes a free one, and its peers look into the file. Raises zmq.ZMQError.
    """
    keys = key_folder(config, run_folder)
    configured = config.replay.address
    former = read_address(run_folder)
    if former is not None and configured.endswith(_FREE_PORT):
        again = configured.removesuffix(_FREE_PORT) + ":" + former.rpartition(":")[2]
        try:
            return Router(again, config.stream, keys)
        except zmq.ZMQError as error:
            log.warning("the former address is not free: %s", error)
    return Router(configured, config.stream, keys)
