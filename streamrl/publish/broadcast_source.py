"""Weights by torch.distributed broadcast: the learner is rank 0 of one group per server, the server's ranks the others.

    manifest: listen ──▶ (sink: the server joins) ──▶ send: join, one broadcast a bucket ──▶ kept for the next version

A group is made when a server gets its first version and kept until the server fails or leaves. SGLang
is not imported: its end is entered over HTTP by the sink.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from streamrl.device import Device
from streamrl.publish.rank_zero import OwnRankZero, RankZero
from streamrl.publish.rank_zero_process import SeparateRankZero
from streamrl.publish.staging import Staged
from streamrl.publish.transport import GLOO, BroadcastManifest, Check, PublishError, Source
from streamrl.publish.weight_group import Meeting
from streamrl.stream.messages import ServerState


@dataclass(slots=True)
class _Group:
    """The group with one server, and the store through which it meets."""

    meeting: Meeting
    store: dist.TCPStore
    met: bool = False  # rank 0 was told to join


class BroadcastSource(Source):
    """The stores of all groups, and their rank 0."""

    def __init__(self, host: str, device: Device, timeout: float) -> None:
        """`host`: this machine's address as the servers see it. `timeout`: seconds that one server may take."""
        self._host = host
        self._backend = device.backend
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, _Group] = {}
        self._rank_zero: RankZero
        if self._backend == GLOO:
            self._rank_zero = OwnRankZero(device.torch_device, timeout)
        else:
            self._rank_zero = SeparateRankZero(device, timeout)

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        with _publish_errors(server):
            self._rank_zero.prepare()
            group = self._groups.get(server.name)
            if group is None or not self._is_usable(group, server):
                group = self._groups[server.name] = self._listen(server)
        meeting = group.meeting
        manifest = BroadcastManifest(
            group=meeting.group,
            host=meeting.host,
            port=meeting.port,
            world_size=meeting.world_size,
            backend=meeting.backend,
            buckets=staged.layouts(checksums=False),
        )
        described: dict[str, Any] = msgspec.to_builtins(manifest)
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        group = self._groups[server.name]
        with _publish_errors(server):
            if not group.met:
                _await_member(group.store, check)
                group.met = True
            self._rank_zero.send(group.meeting, group.store, staged, check)

    def drop(self, server: str) -> None:
        group = self._groups.pop(server, None)
        if group is not None:
            self._rank_zero.leave(group.meeting.group)

    def reads_on(self) -> bool:
        return self._rank_zero.reads_on()

    def close(self) -> None:
        for server in list(self._groups):
            self.drop(server)
        self._rank_zero.close()

    def _is_usable(self, group: _Group, server: ServerState) -> bool:
        """Nobody has joined it yet, or all of its members are still in it."""
        same = group.meeting.world_size == server.world_size + 1
        return same and (not group.met or self._rank_zero.is_in(group.meeting.group))

    def _listen(self, server: ServerState) -> _Group:
        """Open the store on a free port of the one interface that servers use."""
        self.drop(server.name)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        store = dist.TCPStore(
            self._host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        meeting = Meeting(
            group=f"streamrl-{uuid.uuid4().hex[:12]}",  # new each time: torch and SGLang keep groups by name
            backend=self._backend,
            world_size=server.world_size + 1,
            host=self._host,
            port=store.port,
        )
        return _Group(meeting, store)


@contextlib.contextmanager
def _publish_errors(server: ServerState) -> Iterator[None]:
    """No port, no file or no process left here, and what happens to one server, is a publish that failed."""
    try:
        yield
    except PublishError:
        raise
    except (OSError, RuntimeError) as error:  # torch's network and backend errors are RuntimeErrors of several names
        raise PublishError(f"{server.name}: {error}") from error


def _await_member(store: dist.TCPStore, check: Check) -> None:
    """Wait until the server has come to the store, so that joining, which cannot be interrupted, is short."""
    while store.num_keys() == 0:  # a client counts itself when it connects
        check()
