"""One of several ranks with Transformer Engine's layers: log-probs of a batch and the gradients, summed over ranks.

Started by `test_context.py` as `ranks_at_work.py MODEL SETTINGS OUT`; rank 0 writes OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import faked_engine

faked_engine.install()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch_kernels  # noqa: E402
from engine_learner import EngineLearner, log_probs_and_gradients  # noqa: E402


def main(folder: Path, settings: str, out: Path) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    torch_kernels.install(patch)
    with EngineLearner.started(folder, patch, dtype="float32", **json.loads(settings)) as made:
        log_probs, entropies, gradients = log_probs_and_gradients(made)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        if made.ranks.rank == 0:
            torch.save((made.model.layers.kind, log_probs, entropies, gradients), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
