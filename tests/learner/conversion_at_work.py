"""What ranks do for a test of the conversion: `conversion_at_work.py CONFIG.json OUT FOLDER ...`.

Each folder's weights go into a model that is cut as the configuration says, and out again. The first rank saves
what came out of each; on the others nothing may.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from streamrl.config import Config
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.model import build
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import read_shape


def convert(config: Config, ranks: Ranks, folder: Path) -> list[tuple[str, torch.Tensor]]:
    chunks = build(read_shape(folder), config, ranks.device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))  # what is not loaded shows
    load_weights(chunks, folder)
    if any(parameter.isnan().any() for chunk in chunks for parameter in chunk.parameters()):
        raise ValueError(f"{folder}: a parameter was not loaded")
    return [(name, tensor.clone()) for name, tensor in export_weights(chunks)]


def main() -> None:
    config_path, out, *folders = map(Path, sys.argv[1:])
    config = Config.model_validate_json(config_path.read_text())
    ranks = Ranks.start(config)
    exported = {str(folder): convert(config, ranks, folder) for folder in folders}
    if ranks.rank == 0:
        torch.save(exported, out)
    elif any(exported.values()):
        raise ValueError(f"rank {ranks.rank} was given weights")
    ranks.stop()


if __name__ == "__main__":
    main()
