"""What `benchmarks/adversary.py` sends against a run, and the run itself: peers by hand, a bad network, processes.

A `Member` has the run's keys and says what it likes; a `Stranger` has a TCP connection and no key. The `Proxy` is
between a run's processes and does what a bad network, or somebody on it, does to their connections. The `Circle` is the
real replay service with the scripted worker and learner of `benchmarks/fault_roles.py`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil
import zmq

from benchmarks.fault_roles import Trained, read_record
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.events import event_path
from streamrl.stream.address import address_path, read_address
from streamrl.stream.keys import ClientKeys, client_keys, key_folder
from streamrl.stream.messages import (
    Applied,
    Credit,
    Hello,
    Message,
    Publish,
    ServerState,
    Tickets,
    decode,
    encode,
)
from streamrl.types import PolicyVersion, Ticket

WAIT = 20.0  # seconds for anything that must come
PATIENCE = 1.0  # seconds in which an answer comes, if one comes
SAMPLE = 0.002  # seconds between two looks at the service's memory and descriptors
CHUNK = 1 << 14  # bytes that the proxy handles at a time
ALTERED = 0.3  # seconds after which the proxy ends a connection that it has spoilt, if nobody else did
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"  # of ZMTP 3.1; the mechanism's 20 bytes follow, and 32 more
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

Frame = bytes | memoryview


class Member:
    """A DEALER by hand, with whatever keys it is given."""

    def __init__(self, address: str, keys: ClientKeys | None, name: str = "evil") -> None:
        self.name = f"{name}-{uuid.uuid4().hex[:6]}"
        self.identity = f"{self.name}:x"
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(WAIT * 1000))
        self.socket.setsockopt(zmq.IDENTITY, self.identity.encode())
        if keys is not None:
            self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
            self.socket.curve_serverkey = keys.service_public
        self._sent = 0
        self.socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self._context.term()

    def send(self, message: Message | bytes, *frames: Frame) -> None:
        """A header behind its number, and further frames."""
        header = encode(message) if isinstance(message, Message) else message
        self.raw(self._sent.to_bytes(8, "little") + header, *frames)

    def raw(self, *frames: Frame) -> None:
        """Frames as they are."""
        self._sent += 1
        self.socket.send_multipart(frames)

    def receive(self, timeout: float = PATIENCE) -> Message | None:
        """What the service says; None after `timeout` seconds."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        return decode(self.socket.recv_multipart()[0][8:])

    def join(self, run: str, version: PolicyVersion) -> None:
        """As a worker with one server."""
        server = ServerState(name=f"{self.name}-server", version=version)
        self.send(Hello(run=run, role="generator", name=self.name, servers=(server,)))

    def ticket(self, run: str, version: PolicyVersion) -> Ticket:
        """Join, and wait for one ticket. Raises TimeoutError."""
        self.join(run, version)
        self.send(Credit(capacity=1))
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            message = self.receive()
            if isinstance(message, Tickets):
                return message.tickets[0]
            if isinstance(message, Publish):  # only a server with the newest weights gets tickets
                self.send(Applied(server=message.server, version=message.version))
        raise TimeoutError("no ticket came")


class Stranger:
    """A TCP connection without a key."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.connection = socket.create_connection((host, int(port)), timeout=WAIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def pour(self, chunk: bytes, most: int) -> int:
        """Send it again and again until `most` bytes are sent or the service hangs up. Returns the bytes."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most:
                self.connection.sendall(chunk)
                sent += len(chunk)
        return sent

    def is_hung_up_on(self, timeout: float) -> bool:
        """Whether the service ends the connection within `timeout` seconds."""
        self.connection.settimeout(timeout)
        try:
            while self.connection.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


class Proxy:
    """Forwards connections to `target`, and spoils them as `harm` says, every now and then, in a thread of its own.

    delay: a piece waits; cut: both ends are closed; drop: a piece is left out; repeat: it comes twice; reorder: it
    comes behind the next one. A TCP connection never does the last three to its bytes, but somebody on the way may.
    """

    HARMS = ("delay", "cut", "drop", "repeat", "reorder")

    def __init__(self, target: str, chance: random.Random, rate: float) -> None:
        """`rate`: share of the pieces that something happens to."""
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._chance, self._rate = chance, rate
        self.done = dict.fromkeys(self.HARMS, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closing = threading.Event()
        self._calm = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def calm(self) -> None:
        """From now on everything passes."""
        self._calm.set()

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        for pair in self._pairs:
            _close(*pair)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            try:
                far = socket.create_connection(self._target, timeout=WAIT)
            except OSError:
                _close(near)
                continue
            far.settimeout(None)  # before one direction may close both
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        kept = b""  # that comes behind the next piece
        try:
            while piece := source.recv(CHUNK):
                harm = self._harm()
                if harm == "delay":
                    time.sleep(self._chance.uniform(0.0, 0.1))
                elif harm == "cut":
                    break
                elif harm is not None:
                    threading.Timer(ALTERED, _close, (source, sink)).start()
                if harm == "reorder" and not kept:
                    kept = piece
                    continue
                sink.sendall(b"" if harm == "drop" else piece * 2 if harm == "repeat" else piece + kept)
                kept = b""
        except OSError:
            pass
        _close(source, sink)

    def _harm(self) -> str | None:
        if self._calm.is_set() or self._chance.random() >= self._rate:
            return None
        harm = self._chance.choice(self.HARMS)
        self.done[harm] += 1
        return harm


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class Circle:
    """A run of real processes in `folder`: the replay service, one worker, the learner that counts."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        (folder / "logs").mkdir(parents=True)
        config_file.save(config, folder / "config.yaml")
        self.run = str(config.run.id)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""
        self._seen = 0  # bytes of the service's events that were read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def start_service(self) -> str:
        """Returns its address. Raises RuntimeError with its log where it does not come up."""
        self._start("service", "streamrl.cli", "replay", "--run", str(self.folder))
        deadline = time.monotonic() + WAIT
        while (address := read_address(self.folder)) is None or not self._is_ready():
            if time.monotonic() > deadline or self.service.poll() is not None:
                raise RuntimeError(f"the service does not come up:\n{self.log('service')}")
            time.sleep(0.01)
        self.address = address
        return address

    def start_roles(self) -> None:
        self._start("worker", "benchmarks.fault_roles", "worker", str(self.folder), "0")
        self._start("learner", "benchmarks.fault_roles", "learner", str(self.folder))

    def _start(self, name: str, module: str, *words: str) -> None:
        with (self.folder / "logs" / f"{name}.log").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def service(self) -> subprocess.Popen[bytes]:
        return self._processes["service"]

    @property
    def keys(self) -> ClientKeys:
        return client_keys(key_folder(self.config, self.folder))

    @property
    def steps(self) -> int:
        """That the learner has trained."""
        return sum(isinstance(line, Trained) for line in read_record(self.folder))

    def goes_on(self, steps: int = 3) -> bool:
        """The run trains so many further steps within WAIT seconds, and its service is the same one."""
        before, deadline = self.steps, time.monotonic() + WAIT
        while self.service.poll() is None and time.monotonic() < deadline:
            if self.steps >= before + steps:
                return True
            time.sleep(0.02)
        return False

    def events_of(self) -> list[dict[str, Any]]:
        """The service's events since the last call."""
        with event_path(self.folder, "replay").open("rb") as file:
            file.seek(self._seen)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._seen += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def divert(self, address: str) -> None:
        """A process that looks for the service finds this address."""
        address_path(self.folder).write_text(address + "\n")

    def end(self) -> None:
        """The learner ends with a checkpoint, the others after it."""
        for name in ("learner", "worker", "service"):
            process = self._processes.get(name)
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(WAIT)

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _is_ready(self) -> bool:
        path = event_path(self.folder, "replay")
        return path.exists() and b'"ready"' in path.read_bytes()


class Cost:
    """What a process takes at most while a scene lasts: bytes of memory above its beginning, and descriptors."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self._process.memory_info().rss
        self.memory, self.descriptors = 0, self._process.num_fds()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.Error):
            while not self._ending.wait(SAMPLE):
                self.memory = max(self.memory, self._process.memory_info().rss - self.before)
                self.descriptors = max(self.descriptors, self._process.num_fds())


def changed(header: bytes, **fields: Any) -> bytes:
    """A header frame with other fields; one that is `...` is left out."""
    tree = msgspec.msgpack.decode(header) | fields
    return msgspec.msgpack.encode({name: value for name, value in tree.items() if value is not ...})
