"""A run among enemies: frames that no peer sends, floods, another run at its address, and a network that spoils bytes.

    python -m benchmarks.adversary [--quick] [--seed 0] [--json PATH]

The replay service is the real one, in its own process; worker and learner are those of `benchmarks/fault_roles.py`,
which go on all the while. Everything is authenticated as it is by default (CURVE, on loopback too).

    kinds     one of each kind of frame and group that the service must turn away, by strangers and by members of the
              run, who have its keys (benchmarks/adversary_kinds.py): what was seen, and whether that was right
    floods    connections, frames and messages without an end: the service's memory and descriptors against their bounds
    two runs  a second run at the same address: its service, and a peer of it that has the keys
    network   worker and learner behind a proxy that drops, repeats, delays, reorders and cuts

After every scene the run must train further steps, in the same process. At its end no group is lost, trained twice or
out of order, and the bound holds. Exit code 1 with a list of what broke.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zmq

from benchmarks.adversary_kinds import every_kind, matches
from benchmarks.adversary_peers import GREETING, WAIT, Circle, Cost, Member, Proxy, Stranger
from benchmarks.faults import Verdict, judge
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.output import output_file
from streamrl.stream.door import EVENTS, STRANGERS
from streamrl.stream.messages import Hello, Stop
from streamrl.types import PolicyVersion

MESSAGE = 16 << 20  # stream.max_message
UNREAD = 4 * MESSAGE  # stream.max_unread where it is not given
PENDING = 1000  # events of connections that libzmq queues: these, and EVENTS, may come beyond STRANGERS
BETWEEN_LOOKS = 64 << 20  # bytes that are read in one look, with allowance for a busy machine
TIMES = 3  # that a byte on the wire may cost in memory: a frame without content has 35 bytes, and costs a message
STEPS = 3  # that are trained after every scene


@dataclass
class Kind:
    """One thing that was sent."""

    who: str
    name: str
    expected: str
    seen: str
    holds: bool


@dataclass(slots=True)
class Flood:
    """The most that the service took above what it had, and what it may."""

    name: str
    sent: str
    memory: int
    memory_bound: int
    descriptors: int
    descriptor_bound: int
    steps: int  # that the run trained meanwhile

    @property
    def holds(self) -> bool:
        return self.memory <= self.memory_bound and self.descriptors <= self.descriptor_bound and self.steps > 0


@dataclass
class Result:
    """Everything that was seen; `broken` is empty where all is well."""

    kinds: list[Kind] = field(default_factory=list)
    floods: list[Flood] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    network: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, dict[str, int]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def make_config(folder: Path, port: int = 0) -> Config:
    """Small groups and short patience, as `benchmarks/faults.py` has them."""
    return Config.model_validate(
        {
            "run": {"id": folder.name, "name": folder.name, "folder": folder.parent, "steps": 1_000_000},
            "generate": {"workers": 1, "group_size": 4, "groups_in_flight": 8, "heartbeat": 0.2},
            "stream": {"max_message": MESSAGE, "reply_timeout": 2.0},
            "replay": {
                "address": f"tcp://127.0.0.1:{port}",
                "groups_per_step": 4,
                "max_staleness": 2,
                "lease": 1.5,
                "max_attempts": 1000,
            },
            "journal": {"segment": 1 << 18},
            "learner": {"tick": 0.05},
        }
    )


# -- every kind of frame and group


def send_kinds(circle: Circle, result: Result, quick: bool) -> None:
    slow = 0
    for kind in every_kind():
        if quick and kind.who == "stranger":  # most of them are waited out by the service: three tell enough
            slow += 1
            if slow > 3:
                continue
        circle.events_of()
        try:
            seen = kind.act(circle, circle.address)
        except (OSError, TimeoutError, zmq.ZMQError) as error:
            seen = f"{type(error).__name__}: {error}"
        holds = matches(kind, seen) and circle.service.poll() is None
        result.kinds.append(Kind(kind.who, kind.name, kind.expected, seen, holds))
        print(f"{'  ' if holds else '! '}{kind.who:9}{kind.name:42}{seen[:78]}", flush=True)
        if not holds:
            result.broken.append(f"{kind.who}, {kind.name}: expected {kind.expected!r}, seen {seen!r}")
        if circle.service.poll() is not None:
            return
    _goes_on(circle, result, "kinds")


# -- floods


def flood(circle: Circle, result: Result, quick: bool) -> None:
    share = 0.1 if quick else 1.0
    strangers = STRANGERS + EVENTS + PENDING
    own = 64  # descriptors of members, and of a moment
    floods: list[tuple[str, Callable[[], str], int, int]] = [
        ("connections that stay", lambda: _connect(circle, int(4000 * share)), BETWEEN_LOOKS, strangers),
        ("connections that go", lambda: _come_and_go(circle, 10 * share), BETWEEN_LOOKS, strangers),
        ("frames without a key", lambda: _pour(circle, 8, 10 * share), BETWEEN_LOOKS, strangers),
        ("small frames", lambda: _junk(circle, int(200_000 * share)), BETWEEN_LOOKS, own),
        ("empty frames", lambda: _endless(circle, 2, 0, int(6_000_000 * share)), TIMES * UNREAD + BETWEEN_LOOKS, own),
        ("short frames", lambda: _endless(circle, 2, 40, int(4_000_000 * share)), TIMES * UNREAD + BETWEEN_LOOKS, own),
        ("endless messages", lambda: _endless(circle, 4, 1 << 16, int(8000 * share)), UNREAD + BETWEEN_LOOKS, own),
        ("queues of messages", lambda: _queues(circle, 12, int(10 * share) + 1), UNREAD + BETWEEN_LOOKS, own),
    ]
    for name, act, memory, descriptors in floods:
        before, steps = Cost(circle.service.pid).descriptors, circle.steps
        with Cost(circle.service.pid) as cost:
            sent = act()
            _goes_on(circle, result, name)
        row = Flood(name, sent, cost.memory, memory, cost.descriptors - before, descriptors, circle.steps - steps)
        result.floods.append(row)
        print(
            f"{'  ' if row.holds else '! '}{name:24}{sent:34}"
            f"memory +{row.memory / 2**20:6.1f} of {memory / 2**20:6.1f} MiB"
            f"   descriptors +{row.descriptors:4d} of {descriptors:4d}   steps {row.steps}",
            flush=True,
        )
        if not row.holds:
            result.broken.append(f"flood of {name}: {asdict(row)}")
        if not _settles(circle, before + own):
            result.broken.append(f"flood of {name}: its descriptors were not given back")


def _settles(circle: Circle, descriptors: int) -> bool:
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        if Cost(circle.service.pid).descriptors <= descriptors:
            return True
        time.sleep(0.05)
    return False


def _connect(circle: Circle, count: int) -> str:
    with contextlib.ExitStack() as stack:
        made = 0
        for _ in range(count):
            with contextlib.suppress(OSError):
                stack.enter_context(Stranger(circle.address))
                made += 1
        circle.goes_on(STEPS)
    return f"{made:,} connections"


def _come_and_go(circle: Circle, seconds: float) -> str:
    end, made = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), Stranger(circle.address):
            made += 1
    return f"{made:,} connections"


def _pour(circle: Circle, threads: int, seconds: float) -> str:
    """The greeting, and then a frame of the handshake that is as large as a frame may be."""
    opening = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + MESSAGE.to_bytes(8, "big")
    end, sent, piece = time.monotonic() + seconds, [0] * threads, bytes(1 << 18)

    def pour(index: int) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError), Stranger(circle.address) as stranger:
                sent[index] += stranger.pour(opening, len(opening)) + stranger.pour(piece, MESSAGE)

    _at_once(pour, threads)
    return f"{sum(sent) / 2**20:,.0f} MiB of handshakes"


def _junk(circle: Circle, count: int) -> str:
    def send(_: int) -> None:
        with Member(circle.address, circle.keys) as member:
            for _ in range(count):
                member.send(b"\xc1 junk")
            _delivered(member)

    _at_once(send, 3)
    return f"{3 * count:,} malformed frames"


def _endless(circle: Circle, members: int, size: int, frames: int) -> str:
    """One message from each, which ends only since libzmq would not begin to send it otherwise."""

    def send(_: int) -> None:
        with Member(circle.address, circle.keys) as member, contextlib.suppress(zmq.ZMQError):
            frame = zmq.Frame(bytes(size)) if size > 1024 else bytes(size)
            for _ in range(frames):
                member.socket.send(frame, zmq.SNDMORE, copy=size <= 1024)
            member.socket.send(b"")
            _delivered(member, 5.0)

    _at_once(send, members)
    return f"{members} messages of {frames:,} x {size} bytes"


def _queues(circle: Circle, members: int, messages: int) -> str:
    """Messages that are allowed, from many at once: no more than `stream.max_unread` of them is held."""

    def send(_: int) -> None:
        with Member(circle.address, circle.keys) as member, contextlib.suppress(zmq.ZMQError):
            frame = zmq.Frame(bytes(MESSAGE))
            for _ in range(messages):
                member.socket.send(frame, copy=False)
            _delivered(member, 5.0)

    _at_once(send, members)
    return f"{members} x {messages} messages of {MESSAGE >> 20} MiB"


def _delivered(member: Member, seconds: float = WAIT) -> None:
    """Wait until the service has received what was sent before; a connection that was cut never tells."""
    member.send(Hello(run="nobody", role="generator", name=member.name))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if isinstance(message := member.receive(), Stop) and "nobody" in message.reason:
            return


def _at_once(act: Callable[[int], None], threads: int) -> None:
    started = [threading.Thread(target=act, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


# -- two runs on one address


def meet(circle: Circle, result: Result, folder: Path) -> None:
    """A second run whose configuration names the first one's address, and whose folder has a copy of its keys."""
    port = int(circle.address.rpartition(":")[2])
    config = make_config(folder, port)
    (folder / "logs").mkdir(parents=True)
    config_file.save(config, folder / "config.yaml")
    command = [sys.executable, "-m", "streamrl.cli", "replay", "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    result.runs["its service"] = f"exit code {done.returncode}: {''.join(last)[-160:]}"
    if done.returncode == 0 or "Traceback" in done.stderr:
        result.broken.append(f"two runs: the second service ended with {result.runs['its service']}")
    for role in ("generator", "learner", "publisher"):
        with Member(circle.address, circle.keys) as member:
            member.send(Hello(run=config.run.id or "", role=role, name=member.name, version=PolicyVersion(0)))
            answer = member.receive(WAIT)
        refused = isinstance(answer, Stop) and answer.refused and f"is of run {config.run.id}" in answer.reason
        result.runs[f"its {role}"] = answer.reason[:110] if isinstance(answer, Stop) else str(answer)
        if not refused:
            result.broken.append(f"two runs: the other run's {role} was not refused: {answer}")
    for name, seen in result.runs.items():
        print(f"  {name:18}{seen}", flush=True)
    _goes_on(circle, result, "two runs")


# -- a bad network


def spoil(folder: Path, result: Result, seconds: float, seed: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # the proxy needs the service to come back where it was
        port = free.getsockname()[1]
    config = make_config(folder, port)
    with Circle(config, folder) as circle:
        circle.start_service()
        proxy = Proxy(circle.address, random.Random(seed), rate=0.02)
        circle.divert(proxy.address)
        circle.start_roles()
        if not circle.goes_on(STEPS):
            result.broken.append("network: the run does not begin behind the proxy")
        end = time.monotonic() + seconds
        while time.monotonic() < end and circle.service.poll() is None:
            time.sleep(0.1)
        proxy.calm()
        _goes_on(circle, result, "network")
        circle.end()
        proxy.close()
        result.network = dict(proxy.done)
        print("  " + "   ".join(f"{name} {count}" for name, count in proxy.done.items()), flush=True)
        _judge(circle, result, "network")


# -- the end


def _goes_on(circle: Circle, result: Result, scene: str) -> None:
    if not circle.goes_on(STEPS):
        result.broken.append(f"{scene}: the run makes no progress afterwards\n{circle.log('service')[-2000:]}")


def _judge(circle: Circle, result: Result, scene: str) -> None:
    verdict = judge(circle.folder, circle.config, [], Verdict())
    seen = {
        name: getattr(verdict, name)
        for name in ("steps", "lost", "twice", "reordered", "broken", "placeholders", "quarantined")
    }
    result.verdicts[scene] = seen
    print("  " + "   ".join(f"{name} {count}" for name, count in seen.items()), flush=True)
    if not verdict.holds or not verdict.steps:
        result.broken.append(f"{scene}: {seen}")


@contextmanager
def _scene(name: str) -> Iterator[None]:
    print(f"{name}:", flush=True)
    begun = time.monotonic()
    yield
    print(f"  {time.monotonic() - begun:.1f} s\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the floods, three kinds of stranger")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    result = Result()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Circle(make_config(folder / "first"), folder / "first") as circle:
            circle.start_service()
            circle.start_roles()
            _goes_on(circle, result, "start")
            with _scene("kinds"):
                send_kinds(circle, result, options.quick)
            with _scene("floods"):
                flood(circle, result, options.quick)
            with _scene("two runs"):
                meet(circle, result, folder / "second")
            with _scene("the run among them"):
                circle.end()
                _judge(circle, result, "run")
        with _scene("network"):
            spoil(folder / "spoilt", result, 5.0 if options.quick else 60.0, options.seed)
    right = sum(kind.holds for kind in result.kinds)
    print(f"{right} of {len(result.kinds)} kinds were turned away as they should be")
    print("broken: nothing" if not result.broken else "broken:\n  " + "\n  ".join(result.broken))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1))
    return 1 if result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
