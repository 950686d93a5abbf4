"""The command that starts the ranks of a module on this machine."""

from __future__ import annotations

import sys


def torchrun(ranks: int, module: str) -> list[str]:
    """`python -m module` on so many ranks, which meet on a free loopback port of torchrun's choice.

    One rank has nobody to meet: it is started as it is, and torch is loaded once.
    """
    if ranks == 1:
        return [sys.executable, "-u", "-m", module]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"]
    return [*words, "-m", module]


def rank_environment(ranks: int) -> dict[str, str]:
    """For that command: what torchrun would tell the only rank, whatever the parent is a rank of itself."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} if ranks == 1 else {}
