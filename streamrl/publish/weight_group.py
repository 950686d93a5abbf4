"""The process group of the learner's rank 0 with the ranks of one server: met at a store, joined, used, left."""

from __future__ import annotations

import logging
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a group find each other."""

    group: str  # its name
    backend: str  # gloo | nccl
    world_size: int  # rank 0 and all ranks of the server
    host: str  # of the store, as the servers see it
    port: int


def join(meeting: Meeting, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    """The process group over `store`, beside the default group of this process, if it has one.

    gloo connects all ranks here. NCCL returns at once, and connects them inside the first broadcast.

    The one use of torch's private parts: `new_group` makes subsets of the default group only, and SGLang's
    end is made by the same helper, so that both look for each other under the same keys.
    """
    from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

    members, _ = _new_process_group_helper(
        meeting.world_size,
        0,
        [],
        Backend(meeting.backend),
        PrefixStore(meeting.group, store),
        group_name=GroupName(meeting.group),
        timeout=timeout,
    )
    assert isinstance(members, dist.ProcessGroup)
    _world.pg_group_ranks[members] = {rank: rank for rank in range(meeting.world_size)}  # read when it is destroyed
    return members


def begin(members: dist.ProcessGroup, data: torch.Tensor) -> dist.Work:
    """A broadcast from here."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = True
    return members.broadcast([data], options)


def leave(members: dist.ProcessGroup) -> None:
    """Close the connections, at once and whatever is still under way on them."""
    try:
        members.abort()
        dist.destroy_process_group(members)
    except RuntimeError as error:
        log.warning("a weight group did not close cleanly: %s", error)
