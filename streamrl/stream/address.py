"""Where the replay service listens: `RUN/replay.address`, the one discovery point of a run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.config import Config
from streamrl.whole_files import write_whole

# Seconds between two polls of the file: nothing else tells that a service has come up on another host.
POLL = 0.05


def address_path(run_folder: Path) -> Path:
    return run_folder / "replay.address"


def write_address(run_folder: Path, endpoint: str, host: str | None = None) -> str:
    """Write the address of a service that listens at `endpoint`, whole or not at all. Returns the address.

    A wildcard becomes `host` (None: this machine's name), which peers on other machines can reach.
    """
    for wildcard in ("//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(wildcard, f"//{host or socket.gethostname()}:")
    write_whole(address_path(run_folder), endpoint + "\n")
    return endpoint


def read_address(run_folder: Path) -> str | None:
    """The service's address; None while it does not listen."""
    try:
        return address_path(run_folder).read_text().strip()
    except FileNotFoundError:
        return None


def replay_address(config: Config, run_folder: Path, give_up: Callable[[], bool] = lambda: False) -> str:
    """The service's address, waited for. Raises TimeoutError after `run.start_timeout` seconds, or on `give_up()`."""
    deadline = time.monotonic() + config.run.start_timeout
    while time.monotonic() < deadline and not give_up():
        if (address := read_address(run_folder)) is not None:
            return address
        time.sleep(POLL)
    raise TimeoutError(
        f"no replay service has written {address_path(run_folder)} in run.start_timeout="
        f"{config.run.start_timeout:g} seconds; see {run_folder / 'logs'}"
    )


def host_towards(address: str) -> str:
    """This machine's address on the way to the replay service at `address`, as `tcp://10.0.0.7:7100`."""
    parts = urlsplit(address)
    host, port = parts.hostname or "127.0.0.1", parts.port or 1
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses the way
        return str(probe.getsockname()[0])


def own_host(config: Config, run_folder: Path) -> str:
    """This machine's address for others of the run. Raises TimeoutError as `replay_address`."""
    return host_towards(replay_address(config, run_folder))
