"""Weights by torch.distributed broadcast: the learner is rank 0 of one group per server, the server's ranks the others.

    manifest: listen ──▶ (sink: the server joins) ──▶ send: join, one broadcast a bucket ──▶ kept for the next version

A group is made when a server gets its first version and kept until the server fails or leaves. SGLang
is not imported: its end is entered over HTTP by the sink.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from streamrl.device import Device
from streamrl.device_copy import copying
from streamrl.publish.staging import Staged
from streamrl.publish.transport import BroadcastManifest, Check, PublishError, Source
from streamrl.stream.messages import ServerState

log = logging.getLogger(__name__)

LEFT_POLL = 0.1  # seconds between two looks at the broadcast to a server that was dropped; nobody waits for its end


@dataclass(slots=True)
class _Group:
    """The group with one server: the store through which it meets, and the group once it has met."""

    name: str
    world_size: int
    store: dist.TCPStore
    members: dist.ProcessGroup | None = None
    work: dist.Work | None = None  # the broadcast that was begun last


class BroadcastSource(Source):
    """Rank 0 of every group."""

    def __init__(self, host: str, device: Device, timeout: float) -> None:
        """`host`: this machine's address as the servers see it. `timeout`: seconds that one server may take."""
        self._host = host
        self._device = device
        self._copying = copying(device)
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, _Group] = {}
        self._left: list[dist.Work] = []  # broadcasts to servers that were dropped

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        group = self._groups.get(server.name)
        if group is None or group.world_size != server.world_size + 1:
            group = self._groups[server.name] = self._listen(server)
        manifest = BroadcastManifest(
            group=group.name,
            host=self._host,
            port=group.store.port,
            world_size=group.world_size,
            backend=self._device.backend,
            buckets=staged.layouts(checksums=False),
        )
        described: dict[str, Any] = msgspec.to_builtins(manifest)
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        group = self._groups[server.name]
        try:
            if group.members is None:
                _await_member(group.store, check)
                group.members = _join(group, self._device.backend, self._timeout)
            self._broadcast(group, group.members, staged, check)
        except RuntimeError as error:  # torch's network and backend errors are RuntimeErrors of several names
            if isinstance(error, PublishError):
                raise
            raise PublishError(f"{server.name}: {error}") from error

    def _broadcast(self, group: _Group, members: dist.ProcessGroup, staged: Staged, check: Check) -> None:
        """One bucket after another; while one goes out, the next is brought to the device."""
        with self._copying.sending():
            ahead = self._copying.into(staged.buckets[0].data)
            for following in (*staged.buckets[1:], None):
                group.work = _begin(members, ahead)
                if following is not None:
                    ahead = self._copying.into(following.data)
                while not group.work.is_completed():
                    check()
                group.work.wait()  # raises what went wrong

    def drop(self, server: str) -> None:
        group = self._groups.pop(server, None)
        if group is not None and group.members is not None:
            _leave(group.members)
            if group.work is not None and not group.work.is_completed():
                self._left.append(group.work)
                threading.Thread(target=_outlast, args=(group.members, group.work), name="left", daemon=True).start()

    def reads_on(self) -> bool:
        self._left = [work for work in self._left if not work.is_completed()]
        return bool(self._left) and self._device.kind == "cpu"  # elsewhere it is a buffer of the device that goes out

    def close(self) -> None:
        for server in list(self._groups):
            self.drop(server)

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
        name = f"streamrl-{uuid.uuid4().hex[:12]}"  # new each time: torch and SGLang keep groups by name
        return _Group(name, server.world_size + 1, store)


def _await_member(store: dist.TCPStore, check: Check) -> None:
    """Wait until the server has come to the store, so that joining, which cannot be interrupted, is short."""
    while store.num_keys() == 0:  # a client counts itself when it connects
        check()


def _join(group: _Group, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """The process group over `group.store`, beside the default group of this process.

    The one use of torch's private parts: `new_group` makes subsets of the default group only, and SGLang's
    end is made by the same helper, so that both look for each other under the same keys.
    """
    from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

    if backend == "nccl":
        timeout = 2 * timeout  # NCCL's own watchdog ends the process; ours, which only drops the group, comes first
    members, _ = _new_process_group_helper(
        group.world_size,
        0,
        [],
        Backend(backend),
        PrefixStore(group.name, group.store),
        group_name=GroupName(group.name),
        timeout=timeout,
    )
    assert isinstance(members, dist.ProcessGroup)
    _world.pg_group_ranks[members] = {rank: rank for rank in range(group.world_size)}  # read when it is destroyed
    return members


def _begin(members: dist.ProcessGroup, data: torch.Tensor) -> dist.Work:
    """A broadcast from here."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = True
    return members.broadcast([data], options)


def _leave(members: dist.ProcessGroup) -> None:
    """Close the connections, at once and whatever is still under way on them."""
    try:
        members.abort()
        dist.destroy_process_group(members)
    except RuntimeError as error:
        log.warning("a weight group did not close cleanly: %s", error)


def _outlast(members: dist.ProcessGroup, work: dist.Work) -> None:
    """Hold a group until its last broadcast has ended, if need be by its timeout.

    gloo has no abort: whoever lets go of a group last waits for what is under way on it. Here that is a thread with
    nothing else to do, and not the publisher's, which has other servers. It never waits inside torch: a thread that
    is there when the process ends takes the process down with an error.
    """
    while not work.is_completed():
        time.sleep(LEFT_POLL)
