"""A server that joins its weight group and then receives nothing until it is told to, as if its host were cut off.

python -m tests.publish.silent_server GROUP PORT BYTES FOLDER

FOLDER/joined is written by it, FOLDER/go awaited; then it prints the checksum of the broadcast's bytes.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper

LIMIT = 60.0  # seconds


def main(name: str, port: int, size: int, folder: Path) -> None:
    limit = timedelta(seconds=LIMIT)
    store = PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    members, _ = _new_process_group_helper(2, 1, [], Backend("gloo"), store, group_name=GroupName(name), timeout=limit)
    (folder / "joined").touch()
    deadline = time.monotonic() + LIMIT
    while not (folder / "go").exists():
        if time.monotonic() > deadline:
            sys.exit("nobody said go")
        time.sleep(0.01)
    data = torch.empty(size, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    members.broadcast([data], options).wait()
    print(xxhash.xxh3_64_hexdigest(data.numpy().data))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
