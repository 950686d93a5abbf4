"""What the tests of the service share: a small configuration, a service in a thread or a process, peers by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from streamrl.config import Config
from streamrl.observe.events import EventLog, read_events
from streamrl.replay.service import Service
from streamrl.stream.address import replay_address
from streamrl.stream.messages import (
    Accepted,
    Announce,
    Credit,
    Hello,
    Introduce,
    Message,
    Refused,
    ServerState,
    Tickets,
    Welcome,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Group, Ledger, PolicyVersion, Ticket

RUN = "run-of-the-tests"
WAIT = 60.0  # seconds for anything that must come; nothing waits as long when all is well
V0, V1 = PolicyVersion(0), PolicyVersion(1)
MakeGroup = Callable[..., Group]
M = TypeVar("M")


class Clock:
    """The time of a service, which a test moves on: nothing is late because the test is slow."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds

    def __call__(self) -> float:
        return self.now

    def pass_until(self, condition: Callable[[], object]) -> None:
        """Let time pass, twice as fast as it does, in steps that a service does not take for its own absence."""
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline
            self.now += 0.1
            time.sleep(0.05)


def make_config(**sections: dict[str, Any]) -> Config:
    """Steps of two groups, staleness 1: four slots."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"id": RUN, "steps": 3, "stop_timeout": 5.0, "start_timeout": 120.0},
        "generate": {"heartbeat": 1.0, "group_size": 2},
        "replay": {"groups_per_step": 2, "max_staleness": 1},
        "publish": {"timeout": 5.0},
        "journal": {"keep": "all"},
        "stream": {"curve": "off"},  # no keys to be made for each test: the wire has tests of its own
    }
    for name, fields in sections.items():
        tree.setdefault(name, {}).update(fields)
    return Config.model_validate(tree)


class Running:
    """A service in a thread, and the peers that a test makes."""

    def __init__(self, config: Config, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.folder = config, folder
        self.events = EventLog(folder / "events" / "replay-0.jsonl", "replay-0")
        self.service = Service(config, folder, self.events, clock=clock)
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.service.run()))
        self.thread.start()
        self.peers: list[Dealer] = []

    def peer(self, hello: Hello) -> Dealer:
        """A peer whose Hello was received: what another one sends next comes after it."""
        before = len(self.events_of("replay.hello"))
        dealer = Dealer(self.service.address, self.config.stream, name=hello.name)
        self.peers.append(dealer)
        dealer.send(hello)
        self.wait_for("replay.hello", before + 1)
        return dealer

    def worker(
        self,
        name: str = "w",
        capacity: int = 99,
        version: PolicyVersion = V0,
        tickets: tuple[tuple[int, int], ...] = (),
    ) -> Dealer:
        server = ServerState(name=f"{name}-server", version=version)
        dealer = self.peer(Hello(run=RUN, role="generator", name=name, servers=(server,), tickets=tickets))
        dealer.send(Credit(capacity=capacity))
        return dealer

    def learner(self, version: PolicyVersion = V0, ledger: Ledger | None = None) -> Dealer:
        """A learner that was welcomed."""
        dealer = self.peer(Hello(run=RUN, role="learner", name="learner-0", version=version, ledger=ledger))
        self.welcome = receive(dealer, Welcome)
        return dealer

    def publisher(self) -> Dealer:
        return self.peer(Hello(run=RUN, role="publisher", name="publisher-0", version=V0))

    def announce(self, *versions: PolicyVersion, publisher: Dealer | None = None) -> None:
        """A publisher, this one or another, tells of these versions, and its words are received."""
        publisher, before = publisher or self.publisher(), len(self.events_of("publish.announced"))
        for version in versions:
            publisher.send(Announce(version=version))
        self.wait_for("publish.announced", before + len(versions))

    def wait_for(self, event: str, count: int = 1) -> None:
        """Until so many events of this name were recorded."""
        deadline = time.monotonic() + WAIT
        while len(self.events_of(event)) < count:
            assert time.monotonic() < deadline, event
            time.sleep(0.005)

    def events_of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_events(self.events.path) if record["event"] == event]

    def end(self) -> int:
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        return self.codes[0]

    def close(self) -> None:
        self.service.interrupt("the end of the test", 0)
        self.thread.join(WAIT)
        self.events.close()
        for peer in self.peers:
            peer.close()


class ServiceProcess:
    """A service as its own process, by its entry point."""

    SCRIPT = (
        "import sys; from pathlib import Path; from streamrl.config import Config;"
        "from streamrl.replay.service import main;"
        "sys.exit(main(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2])))"
    )

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.start()

    def start(self) -> None:
        """Until it listens; a file of a former service tells nothing about that."""
        before = len(self.events_of("ready"))
        command = [sys.executable, "-c", self.SCRIPT, self.config.model_dump_json(), str(self.folder)]
        self.process = subprocess.Popen(command)
        while len(self.events_of("ready")) == before:
            assert self.process.poll() is None
        self.address = replay_address(self.config, self.folder)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)

    def events_of(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "events" / "replay-0.jsonl"
        return [record for record in read_events(path) if record["event"] == event] if path.exists() else []


def receive(dealer: Dealer, kind: type[M]) -> M:
    """The next message, which must be of this kind."""
    message = dealer.receive(WAIT)
    assert isinstance(message, kind), message
    return message


def receive_tickets(dealer: Dealer, count: int) -> list[Ticket]:
    tickets: list[Ticket] = []
    while len(tickets) < count:
        tickets += receive(dealer, Tickets).tickets
    assert len(tickets) == count
    return tickets


def answer(dealer: Dealer, make_group: MakeGroup, ticket: Ticket, version: PolicyVersion | None = None) -> Message:
    version = version or ticket.issued_version
    dealer.send(make_group(ticket.group_id, attempt=ticket.attempt, version=version))
    while isinstance(message := dealer.receive(WAIT), Tickets | Introduce):  # more may come between
        pass
    assert isinstance(message, Accepted | Refused), message
    return message


def ids(received: ReceivedBatch) -> list[int]:
    return [group.group_id for group in received.batch.groups]
