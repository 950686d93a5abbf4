"""One of several ranks with Transformer Engine's layers, started by `test_forward.py`.

    ranks_at_work.py numbers MODEL SETTINGS OUT    log-probs of a batch, their entropies, the gradients
    ranks_at_work.py weights MODEL SETTINGS OUT    the weights, loaded and exported

SETTINGS: the learner section as JSON; rank 0 writes OUT.
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
import torch_kernels  # noqa: E402
from engine_learner import EngineLearner, log_probs_and_gradients  # noqa: E402

from streamrl.learner.huggingface import export_weights, load_weights  # noqa: E402


def numbers(made: EngineLearner) -> object:
    assert made.model.layers.kind == "transformer_engine"
    return log_probs_and_gradients(made)


def weights(made: EngineLearner) -> object:
    load_weights([made.model], made.config.model.path)
    return {name: tensor.clone() for name, tensor in export_weights([made.model])}


def main(job: str, folder: str, settings: str, out: str) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    torch_kernels.install(patch)
    with EngineLearner.started(Path(folder), patch, dtype="float32", **json.loads(settings)) as made:
        found = {"numbers": numbers, "weights": weights}[job](made)
        if made.ranks.rank == 0:
            torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
