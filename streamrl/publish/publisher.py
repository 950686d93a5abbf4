"""The learner's publisher: takes versions from the training loop and brings every server to the newest one.

    offer ──copy──▶ staging ──thread──▶ keep ──▶ announce ──▶ servers, `at_once` at a time: Publish, bytes, Applied
      ▲ waits only while the former version is still going out

A server that fails is left, tried again after a pause, and never holds the others or the training loop
for longer than `publish.timeout`. A replay service that is started again hears again what there is to publish, and so
does one that was silent for `stream.reply_timeout`: the list of the servers may be lost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from streamrl.config import Config
from streamrl.observe.events import EventLog
from streamrl.publish.kept import keep
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staged
from streamrl.publish.transport import PublishError, Source
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import (
    Announce,
    Applied,
    Bye,
    Hello,
    MalformedMessage,
    Message,
    Publish,
    PublishFailed,
    Roster,
    ServerState,
    Stop,
)
from streamrl.stream.peer import Peer, PeerRefused
from streamrl.stream.sockets import ReceivedBatch, StreamTimeout
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

ROSTER_POLL = 0.05  # seconds between two looks for roster news while there is nothing to do; an offer wakes at once

WAIT_POLL = 0.002
# seconds of one wait for the service while bytes are under way: the time that a failure goes unnoticed, and what
# a broadcast that has finished may wait for its successor.

FIRST_PAUSE = 1.0  # seconds before a failed server is tried again; doubled each time, up to publish.timeout

_END = object()  # what an iterator says that has come to its end


@dataclass(slots=True)
class _Retry:
    """When a failed server is tried again."""

    at: float  # monotonic seconds
    pause: float


@dataclass(frozen=True, slots=True)
class PublishStatistics:
    """What publishing has cost so far."""

    seconds: float = 0.0  # from the start of the last round over the servers to its end
    waited: float = 0.0  # seconds that `offer` has waited for former rounds, in total
    published: int = 0  # servers that got a version, in total
    failed: int = 0


@dataclass(slots=True)
class _Shared:
    """What the training loop and the thread both see, under the condition's lock."""

    staged: Staged | None = None
    taken: Staged | None = None  # the last version that the thread has kept and announced
    roster: dict[str, ServerState] = field(default_factory=dict)
    roster_known: bool = False  # the service has told it at least once
    sending: bool = False  # a version to a server
    failure: BaseException | None = None
    stopped: bool = False  # by the service
    closing: bool = False
    statistics: PublishStatistics = PublishStatistics()


class Publisher:
    """One thread with a socket of its own. `close` it.

    >>> publisher = Publisher(config, run_folder, version, events)
    >>> publisher.offer(PolicyVersion(1), model.export())  # (Hugging Face name, CPU tensor)
    >>> publisher.wait(timeout=60)
    True
    """

    def __init__(self, config: Config, run_folder: Path, version: PolicyVersion, events: EventLog) -> None:
        """`version` that the learner has now. The replay service's address is read from the run folder."""
        self._config = config
        self._run_folder = run_folder
        self._run = run_identity(run_folder, config.run.id).id
        self._version = version
        self._events = events
        self._staging = make_staging(config)
        self._staging_lock = threading.Lock()  # held while the staged bytes are written, or read
        self._changed = threading.Condition()
        self._shared = _Shared()
        self._retries: dict[str, _Retry] = {}  # the thread's alone, as the socket and the source are
        self._refusals: dict[str, str] = {}  # server: the reason that its sink gave, this one too
        self._attempt = 0  # number of the newest Publish
        self._attempts: dict[str, int] = {}  # that of each server: what a former one comes to is no news
        self._gone: set[str] = set()  # servers whose process has ended since the last publish to them
        self._openings = 0  # times that the service did not know the publisher, this one too
        self._thread = threading.Thread(target=self._main, name="publisher", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> PublishStatistics:
        with self._changed:
            return self._shared.statistics

    def ready(self, timeout: float) -> bool:
        """Wait, `timeout` seconds at most, until the former version is out and `offer` need not wait. Raises as it."""
        began = time.monotonic()
        with self._changed:
            taken = self._changed.wait_for(lambda: self._shared.failure or not self._is_new(), timeout)
        self._raise_failure()
        free = bool(taken) and self._staging_lock.acquire(timeout=max(0.0, timeout - (time.monotonic() - began)))
        if free:
            self._staging_lock.release()
        with self._changed:
            self._count(waited=self._shared.statistics.waited + time.monotonic() - began)
        return free

    def offer(self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights and return; the thread publishes them. Consumes `tensors`, one after another.

        Waits while the former version is still going out, `publish.timeout` at most for each server. Raises
        RuntimeError when the thread has failed, or not come back in `run.silence_timeout`.
        """
        began, limit = time.monotonic(), self._config.run.silence_timeout
        with self._changed:  # every version is taken, so that none is missing among the kept ones
            self._changed.wait_for(lambda: self._shared.failure or not self._is_new(), limit)
        self._raise_failure()
        if not self._staging_lock.acquire(timeout=limit):
            raise RuntimeError(f"the publisher did not finish in run.silence_timeout={limit:g} s")
        waited = time.monotonic() - began
        try:
            staged = self._staging.fill(version, tensors)
        finally:
            self._staging_lock.release()
        with self._changed:
            self._shared.staged = staged
            self._count(waited=self._shared.statistics.waited + waited)
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until every live server has the newest version and the thread is done with it.

        False when `timeout` seconds were not enough.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._shared.failure or self._is_complete(), timeout)
        self._raise_failure()
        return bool(done)

    def close(self) -> None:
        """End the thread; a transfer that is under way is given up."""
        with self._changed:
            self._shared.closing = True
            self._changed.notify_all()
        self._thread.join(self._config.publish.timeout)
        if self._thread.is_alive():  # inside a join of a process group, which nothing can interrupt
            log.warning("the publisher's thread did not end in publish.timeout; it ends with the process")

    def _raise_failure(self) -> None:
        with self._changed:
            failure = self._shared.failure
        if isinstance(failure, PeerRefused):
            raise failure
        if failure is not None:
            raise RuntimeError(f"the publisher has failed: {failure}") from failure

    def _is_complete(self) -> bool:
        """Call with the lock held."""
        shared = self._shared
        if shared.stopped or shared.staged is None:
            return True
        newest, taken = shared.staged.version, shared.taken is shared.staged
        settled = taken and shared.roster_known and not shared.sending
        return settled and all(state.version >= newest for state in shared.roster.values())

    # -- the thread

    def _main(self) -> None:
        try:
            with contextlib.closing(Peer(self._config, self._run_folder, "publisher", self._opening)) as peer:
                source = make_source(self._config, self._run_folder, peer.address)
                with contextlib.closing(source):
                    while self._next_round():
                        self._hear(peer, 0.0)
                        peer.insist()
                        self._round(peer, source)
                peer.send(Bye())
        except Exception as failure:  # goes on in the training loop's thread
            if not isinstance(failure, PeerRefused):
                log.exception("the publisher has failed")
            with self._changed:
                self._shared.failure = failure
                self._changed.notify_all()

    def _opening(self) -> Iterator[Message]:
        """What a service hears first, also one that was started again: its servers are known once it tells them."""
        self._openings += 1
        with self._changed:
            taken, self._shared.roster_known = self._shared.taken, False
        version = taken.version if taken else self._version
        yield Hello(run=self._run, role="publisher", name="publisher", version=version)
        if taken is not None:
            yield Announce(version=taken.version)

    def _next_round(self) -> bool:
        """Wait for an offer, or for the next look at the roster. False: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._shared.closing or self._is_new(), ROSTER_POLL)
            return not self._shared.closing

    def _is_new(self) -> bool:
        return self._shared.staged is not self._shared.taken

    def _round(self, peer: Peer, source: Source) -> None:
        """Keep and announce a new version; bring the servers that are behind to the newest one."""
        with self._staging_lock:
            with self._changed:
                staged, is_new, stopped = self._shared.staged, self._is_new(), self._shared.stopped
            if staged is None:
                return
            if is_new:
                self._take(peer, staged)
            began = time.monotonic()
            behind = [] if stopped else self._behind(staged.version)
            for first in range(0, len(behind), self._config.publish.at_once):
                together = behind[first : first + self._config.publish.at_once]
                with self._sending():
                    _run([self._publish(peer, source, server, staged) for server in together])
            if behind:
                self._count(seconds=time.monotonic() - began)

    def _take(self, peer: Peer, staged: Staged) -> None:
        """A version is kept before any server has it: no token without the weights that it can be checked with."""
        every = self._config.publish.keep_every
        if every and staged.version.step % every == 0:
            with self._events.span("publish.keep", version=str(staged.version)):
                keep(staged, self._config, self._run_folder)
        peer.send(Announce(version=staged.version))
        self._retries.clear()
        with self._changed:
            self._shared.taken = staged
            self._changed.notify_all()

    def _behind(self, version: PolicyVersion) -> list[ServerState]:
        """Servers with older weights, free to change them, whose pause after a failure, if any, is over."""
        now = time.monotonic()
        with self._changed:
            servers = [state for state in self._shared.roster.values() if state.version < version and not state.pinned]
        return [state for state in servers if state.name not in self._retries or self._retries[state.name].at <= now]

    def _publish(self, peer: Peer, source: Source, server: ServerState, staged: Staged) -> Iterator[None]:
        """One version to one server, within `publish.timeout`; a failure is counted and retried later.

        Gives way to other servers' while it waits for this one.
        """
        deadline = time.monotonic() + self._config.publish.timeout
        self._refusals.pop(server.name, None)  # of a former try
        self._attempt += 1
        attempt = self._attempts[server.name] = self._attempt
        if server.name in self._gone:
            self._gone.discard(server.name)
            source.drop(server.name)  # what was shared with the former process leads nowhere
        openings = self._openings

        def check() -> None:
            self._hear(peer, WAIT_POLL)
            if self._openings != openings:
                raise PublishError(f"{server.name}: what was said of it may be lost with a former replay service")
            self._check(server.name, staged.version, deadline)

        try:
            with self._events.span("publish", server=server.name, version=str(staged.version)):
                manifest = source.manifest(server, staged)
                peer.send(Publish(server=server.name, version=staged.version, manifest=manifest, attempt=attempt))
                source.send(server, staged, check)
                while self._version_of(server.name) < staged.version:
                    yield
                    check()
        except (PublishError, StreamTimeout) as error:
            self._failed(source, server.name, str(error))
            return
        self._retries.pop(server.name, None)
        self._count(published=self.statistics.published + 1)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """`wait` returns when this is over, not before."""
        with self._changed:
            self._shared.sending = True
        try:
            yield
        finally:
            with self._changed:
                self._shared.sending = False
                self._changed.notify_all()

    def _check(self, server: str, version: PolicyVersion, deadline: float) -> None:
        """Raise PublishError when waiting for `server` has become pointless."""
        with self._changed:
            state, ending = self._shared.roster.get(server), self._shared.closing or self._shared.stopped
        if server in self._refusals:
            raise PublishError(f"{server}: {self._refusals[server]}")
        if state is None:
            raise PublishError(f"{server} has left")
        if state.pinned and state.version < version:
            raise PublishError(f"{server} is being evaluated")
        if ending:
            raise PublishError(f"{server}: the publisher is closing")
        if time.monotonic() > deadline:
            raise PublishError(f"{server} did not finish in publish.timeout={self._config.publish.timeout:g} s")

    def _failed(self, source: Source, server: str, reason: str) -> None:
        source.drop(server)
        if source.reads_on():
            self._staging.leave()
        former = self._retries.get(server)
        pause = min(2 * former.pause, self._config.publish.timeout) if former else FIRST_PAUSE
        self._retries[server] = _Retry(time.monotonic() + pause, pause)
        log.warning("publish failed, next try in %g s: %s", pause, reason)
        self._count(failed=self.statistics.failed + 1)

    def _hear(self, peer: Peer, timeout: float) -> None:
        """Take in what the service said, waiting `timeout` seconds for the first message."""
        peer.beat()
        while True:
            try:
                message = peer.receive(timeout)
            except MalformedMessage as error:
                log.warning("malformed message from the replay service: %s", error.reason)
                continue
            if message is None:
                return
            timeout = 0.0
            self._note(message)

    def _note(self, message: Message | ReceivedBatch) -> None:
        with self._changed:
            match message:
                case Roster(servers=servers):
                    former, self._shared.roster = self._shared.roster, {state.name: state for state in servers}
                    self._gone |= {name for name, state in former.items() if self._has_ended(state)}
                    self._shared.roster_known = True
                case Applied(server=server, version=version, pinned=pinned) if server in self._shared.roster:
                    world_size = self._shared.roster[server].world_size
                    state = ServerState(name=server, version=version, world_size=world_size, pinned=pinned)
                    self._shared.roster[server] = state
                case PublishFailed(server=server, reason=reason, attempt=of) if of == self._attempts.get(server):
                    self._refusals[server] = reason
                case Stop():
                    self._shared.stopped = True
            self._changed.notify_all()

    def _has_ended(self, former: ServerState) -> bool:
        """It left, or another process with older weights has its name. Call with the lock held."""
        now = self._shared.roster.get(former.name)
        return now is None or now.version < former.version

    def _version_of(self, server: str) -> PolicyVersion:
        with self._changed:
            state = self._shared.roster.get(server)
        return state.version if state is not None else PolicyVersion(0)

    def _count(self, **changes: Any) -> None:
        with self._changed:
            self._shared.statistics = replace(self._shared.statistics, **changes)


def _run(publishes: list[Iterator[None]]) -> None:
    """All of them to their ends, in turns."""
    while publishes:
        publishes = [publish for publish in publishes if next(publish, _END) is not _END]
