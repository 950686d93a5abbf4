"""The learner's publisher: takes versions from the training loop and brings every server to the newest one.

    offer ──copy──▶ staging ──thread──▶ keep ──▶ announce ──▶ servers, `at_once` at a time: Publish, bytes, Applied
      ▲ waits only while the former version is still going out; the thread waits for the end of the copy

What is known of each server, and when it gets a version, is decided in `publish/server_weights.py`. A server that fails
holds the others for `publish.timeout` at most, and several that fail hold the training loop for two of them, however
many they are: a version that has waited for one ends the round of the former. A replay service that is started again
is told again what there is to publish, and so is one that was silent for `stream.reply_timeout`: the list of the
servers may be lost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from streamrl.config import Config
from streamrl.device_copy import Copied
from streamrl.observe.events import EventLog
from streamrl.publish.kept_versions import KeptVersions
from streamrl.publish.server_weights import Servers, ServerWeights, State
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staged
from streamrl.publish.transport import PublishError, Source
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import (
    Announce,
    Applied,
    Bye,
    Hello,
    Message,
    Publish,
    PublishFailed,
    Roster,
    ScoredAnswer,
    Stop,
)
from streamrl.stream.peer import Peer
from streamrl.stream.session import PeerRefused
from streamrl.stream.sockets import ReceivedBatch, StreamTimeout
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# Seconds of the longest wait for an offer, which wakes at once, before the service's messages are read again.
ROSTER_POLL = 0.05

# Seconds of one wait for the service while bytes are under way: the time that a failure goes unnoticed, and what
# a broadcast that has finished may wait for its successor.
WAIT_POLL = 0.002

# Seconds in which a transport comes to its end by itself once its server has reported the version.
SEND_END = 1.0

# Seconds between two tries to keep a version on a full disk: each one fills it.
KEEP_POLL = 10.0

# What an iterator returns that has come to its end.
_END = object()


class _Superfluous(Exception):
    """The server has reported the version, of a former attempt: its sink takes no bytes for this one."""


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

    servers: Servers
    staged: Staged | None = None
    taken: Staged | None = None  # the last version that the thread has kept and announced
    sending: bool = False  # a version to a server
    waits_since: float | None = None  # a version, for the end of the round of the former; -inf: it need not any more
    failure: BaseException | None = None
    stopped: bool = False  # by the service
    closing: bool = False
    statistics: PublishStatistics = PublishStatistics()


class Publisher:
    """One thread with a socket of its own. `close` it.

    Usage:
        publisher = Publisher(config, run_folder, version, events)
        publisher.offer(PolicyVersion(1), model.export())  # (Hugging Face name, tensor)
        publisher.wait(timeout=60)  # True
    """

    def __init__(self, config: Config, run_folder: Path, version: PolicyVersion, events: EventLog) -> None:
        """`version` that the learner has now. The replay service's address is read from the run folder."""
        self._config = config
        self._run_folder = run_folder
        self._run = run_identity(run_folder, config.run.id).id
        self._version = version
        self._events = events
        self._kept = KeptVersions(config, run_folder, events)
        self._staging = make_staging(config)
        self._staging_lock = threading.Lock()  # held while the staged bytes are written, or read
        self._changed = threading.Condition()
        self._shared = _Shared(Servers(config.publish.timeout))
        self._thread = threading.Thread(target=self._main, name="publisher", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> PublishStatistics:
        with self._changed:
            return self._shared.statistics

    def ready(self, timeout: float) -> bool:
        """Wait, `timeout` seconds at most, until the former version is out and `offer` need not wait. Raises as it.

        Once it is, nothing more goes out before the offer: the other ranks are in the export by then.
        """
        began = time.monotonic()
        with self._changed:
            taken = self._changed.wait_for(lambda: self._shared.failure or not self._is_new(), timeout)
        self._raise_failure()
        free = bool(taken) and self._take_staging(max(0.0, timeout - (time.monotonic() - began)))
        if free:
            with self._changed:
                self._shared.waits_since = float("-inf")
            self._staging_lock.release()
        with self._changed:
            self._count(waited=self._shared.statistics.waited + time.monotonic() - began)
        return free

    @property
    def lacks_room(self) -> bool:
        """Whether the former version waits for room on the disk, where it is to be kept (`publish.keep_every`)."""
        return self._kept.lacks_room

    @property
    def waits_for_servers(self) -> bool:
        """Whether it is a server that the former version waits for, and not the source or the disk."""
        with self._changed:
            return self._shared.servers.have_time

    def offer(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        resident: Collection[int] = (),
        scored: tuple[ScoredAnswer, ...] = (),
    ) -> Copied:
        """Copy the weights and return; the thread publishes them. Consumes `tensors`, one after another.

        Of a GPU the copy may still be under way: no weight may change before what is returned is done. `resident`: as
        of `DeviceCopy.out`; `scored`: with these weights, for each server to do the same. Waits while the former
        version is still going out, to servers that hang for two `publish.timeout` at most. Raises RuntimeError when the
        thread has failed, or not come back in `run.silence_timeout`, and what `tensors` raises: then nothing more is
        published.
        """
        began, limit = time.monotonic(), self._config.run.silence_timeout
        with self._changed:  # every version is taken, so that none is missing among the kept ones
            taken = self._changed.wait_for(lambda: self._shared.failure or not self._is_new(), limit)
        self._raise_failure()
        if not taken or not self._take_staging(limit):
            raise RuntimeError(f"the publisher did not finish in run.silence_timeout={limit:g} s")
        waited = time.monotonic() - began
        try:
            staged = self._staging.fill(version, tensors, resident)
            staged.scored = scored
            with self._changed:  # before the lock is free: the bytes are no longer those of the former version
                self._shared.staged, self._shared.waits_since = staged, None
                self._count(waited=self._shared.statistics.waited + waited)
                self._changed.notify_all()
        except BaseException:  # the former version's bytes are overwritten in part: no server may have them
            with self._changed:
                self._shared.closing = True
                self._changed.notify_all()
            raise
        finally:
            self._staging_lock.release()
        return staged.copied

    def _take_staging(self, timeout: float) -> bool:
        """Take the lock of the staged bytes. Where that fails, the version goes on waiting."""
        with self._changed:
            if self._shared.waits_since is None:
                self._shared.waits_since = time.monotonic()
        return self._staging_lock.acquire(timeout=timeout)

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
        taken = shared.taken is shared.staged
        return taken and not shared.sending and shared.servers.have(shared.staged.version)

    # -- the thread

    def _main(self) -> None:
        try:
            with contextlib.closing(Peer(self._config, self._run_folder, "publisher", self._opening)) as peer:
                source = make_source(self._config, self._run_folder, peer.address)
                with contextlib.closing(source):
                    while self._next_round():
                        self._receive(peer, 0.0)
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
        """What a service is told first, also one that was started again: its servers are known once it reports them."""
        with self._changed:
            self._shared.servers.forgotten()
            taken = self._shared.taken
        version = taken.version if taken else self._version
        yield Hello(run=self._run, role="publisher", name="publisher", version=version)
        if taken is not None:
            yield Announce(version=taken.version)

    def _next_round(self) -> bool:
        """Wait for an offer, or until the service's messages are due. False: the end."""
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
                closing = self._shared.closing  # maybe since the wait for the staged bytes
            if staged is None or closing:
                return
            if is_new:
                self._await_copy(peer, staged)
                if not self._kept.add(staged):  # before any server has it: no token without what it is checked with
                    self._pause(KEEP_POLL)
                    return
                self._announce(peer, staged)
            if due := [] if stopped else self._due(staged.version):
                began, at_once = time.monotonic(), self._config.publish.at_once
                while due and not self._holds_up():
                    together, due = due[:at_once], due[at_once:]
                    with self._sending():
                        _run([self._publish(peer, source, server, staged) for server in together])
                self._count(seconds=time.monotonic() - began)

    def _holds_up(self) -> bool:
        """Has the next version waited so long that the servers that are left get that one?"""
        with self._changed:
            since = self._shared.waits_since
        return since is not None and time.monotonic() - since >= self._config.publish.timeout

    def _await_copy(self, peer: Peer, staged: Staged) -> None:
        """Wait until the bytes are there. Raises RuntimeError after `run.silence_timeout`."""
        limit = self._config.run.silence_timeout
        deadline = time.monotonic() + limit
        while not staged.copied.is_done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {staged.version} was not copied in run.silence_timeout={limit:g} s")
            self._receive(peer, WAIT_POLL)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._shared.closing, seconds)

    def _announce(self, peer: Peer, staged: Staged) -> None:
        peer.send(Announce(version=staged.version))
        with self._changed:
            self._shared.servers.announced()
            self._shared.taken = staged
            self._changed.notify_all()

    def _due(self, version: PolicyVersion) -> list[ServerWeights]:
        with self._changed:
            return self._shared.servers.due(version, time.monotonic())

    def _publish(self, peer: Peer, source: Source, server: ServerWeights, staged: Staged) -> Iterator[None]:
        """One version to one server, within `publish.timeout`; a failure is counted and retried later.

        Gives way to other servers' while it waits for this one.
        """
        with self._changed:
            if not server.is_due(staged.version, time.monotonic()):
                return  # what others waited for has changed that
            stale = self._shared.servers.begin(server, staged.version)
            reported, attempt = server.reported, server.attempt
        assert attempt is not None
        if stale:
            source.drop(server.name)

        def check() -> None:
            self._receive(peer, WAIT_POLL)
            self._check(server)

        has_it_since: float | None = None

        def check_sink() -> None:
            nonlocal has_it_since
            check()
            if server.has_version:
                has_it_since = has_it_since or time.monotonic()
                if time.monotonic() - has_it_since > SEND_END:
                    raise _Superfluous

        try:
            with self._events.span("publish", server=server.name, version=str(staged.version)):
                manifest = source.manifest(reported, staged)
                with self._changed:
                    server.prepared(time.monotonic())
                peer.send(
                    Publish(
                        server=server.name,
                        version=staged.version,
                        manifest=manifest,
                        attempt=attempt,
                        scored=staged.scored,
                    )
                )
                try:
                    source.send(reported, staged, check_sink)
                except _Superfluous:
                    self._drop(source, server)
                with self._changed:
                    server.sent()
                while server.state is not State.IDLE:
                    yield
                    check()
        except (PublishError, StreamTimeout) as error:
            self._failed(source, server, str(error))
            return
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

    def _check(self, server: ServerWeights) -> None:
        """Raise PublishError when waiting for `server` has become pointless."""
        with self._changed:
            problem, ending = server.problem(time.monotonic()), self._shared.closing or self._shared.stopped
            if problem is None and ending and server.is_open:
                problem = f"{server.name}: the publisher is closing"
        if problem is not None:
            raise PublishError(problem)

    def _drop(self, source: Source, server: ServerWeights) -> None:
        source.drop(server.name)
        if source.reads_on():
            self._staging.leave()

    def _failed(self, source: Source, server: ServerWeights, reason: str) -> None:
        self._drop(source, server)
        with self._changed:
            server.fail(time.monotonic())
            pause = server.pause
        log.warning("publish failed, next try in %g s: %s", pause, reason)
        self._count(failed=self.statistics.failed + 1)

    def _receive(self, peer: Peer, timeout: float) -> None:
        """Handle what the service said, waiting `timeout` seconds for the first message."""
        peer.beat()
        while True:
            message = peer.receive(timeout)
            if message is None:
                return
            timeout = 0.0
            self._handle(message)

    def _handle(self, message: Message | ReceivedBatch) -> None:
        with self._changed:
            match message:
                case Roster(servers=servers):
                    self._shared.servers.handle_roster(servers, time.monotonic())
                case Applied():
                    self._shared.servers.handle_applied(message)
                case PublishFailed():
                    self._shared.servers.handle_failed(message)
                case Stop():
                    self._shared.stopped = True
            self._changed.notify_all()

    def _count(self, **changes: Any) -> None:
        with self._changed:
            self._shared.statistics = replace(self._shared.statistics, **changes)


def _run(publishes: list[Iterator[None]]) -> None:
    """Run all publishes to their ends, in turns."""
    while publishes:
        publishes = [publish for publish in publishes if next(publish, _END) is not _END]
