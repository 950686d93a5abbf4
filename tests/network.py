"""Hosts made of network namespaces, each with a name, an address and a cable to one switch that can be pulled.

`Network.at` runs a command on a host's network alone. `Network.machine` makes more of it: a host name that all hosts
know, processes that end together, and shared memory and temporary files that are gone with it. The file system is
everybody's, as on a cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SUBNET = "10.213.77"

DEVICE = "cable"  # the name of every host's network device

# Inside the new namespaces; the command is process 1 there, so that the kernel ends all others with it.
BOOT = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /var/tmp
shift 2
exec env TMPDIR=/var/tmp "$@"
"""

# ADDRESS KEY: says that it is a worker, without the run's client key; KEY is the service's public one, or "none".
STRANGER = """
import sys, zmq
from streamrl.stream.messages import Credit, Hello, ServerState, encode
from streamrl.types import PolicyVersion
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
if sys.argv[2] != "none":
    socket.curve_serverkey = sys.argv[2].encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
socket.connect(sys.argv[1])
server = ServerState(name="stranger", version=PolicyVersion(0))
hello = Hello(run="r", role="generator", name="stranger", servers=(server,))
for number, message in enumerate((hello, Credit(capacity=9))):
    socket.send(number.to_bytes(8, "little") + encode(message))
sys.exit("it was answered" if socket.poll(3000) else 0)
"""


class Network:
    """The hosts of one test. Made by `network`, which also takes it down."""

    def __init__(self, names: tuple[str, ...], names_file: Path) -> None:
        self.addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(names, 1)}
        self._names_file = names_file

    def at(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on the host's network; its process is the one that is started."""
        return ["ip", "netns", "exec", self._namespace(host), *command]

    def machine(self, host: str, *command: str) -> list[str]:
        """The command line of a whole host that runs `command`. To kill its process is to kill all of the host."""
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc"]
        return self.at(host, *own, "bash", "-c", BOOT, "boot", host, str(self._names_file), *command)

    def at_switch(self, *command: str) -> list[str]:
        """The command line that runs `command` where all that the hosts say passes by."""
        return self.at("switch", *command)

    def link(self, host: str, state: str) -> None:
        """`up` or `down`, at the host's end: what is under way is lost, and nobody is told."""
        _ip("-n", self._namespace(host), "link", "set", DEVICE, state)

    def add(self) -> None:
        """Raises subprocess.CalledProcessError where that is not allowed."""
        self._names_file.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in self.addresses.items())
        )
        switch = self._namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "name", "bridge", "up", "type", "bridge")
        for number, (host, address) in enumerate(self.addresses.items()):
            namespace, port = self._namespace(host), f"port{number}"
            _ip("netns", "add", namespace)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", namespace)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _ip("-n", namespace, "link", "set", device, "up")

    def remove(self) -> None:
        """Every namespace, and the devices in it, once its last process has ended."""
        for host in ("switch", *self.addresses):
            subprocess.run(["ip", "netns", "delete", self._namespace(host)], check=False, capture_output=True)

    def _namespace(self, host: str) -> str:
        return f"{host}-{os.getpid()}"


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Hosts of these names. Skips the test where they cannot be made: root, iproute2 and util-linux are needed."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("hosts are made of network namespaces: iproute2, util-linux and root are needed")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        made = Network(names, Path(folder) / "hosts")
        try:
            try:
                made.add()
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
            yield made
        finally:
            made.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
