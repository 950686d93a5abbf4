"""The logits of a forward pass made those of the draw: divided by its temperature, over the tokens that it kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamrl.sampling_columns import kept_sets, temperatures
from streamrl.types import Sample


def as_drawn(logits: Tensor, sample: Sample, temperature: float) -> Tensor:
    """Logits [T, vocabulary] of the distributions from which the T output tokens of a sample were drawn.

    logits: what predicts each of them, float32; temperature: of the sample's group.
    """
    divided = logits / torch.from_numpy(temperatures(sample, temperature)).to(logits.dtype)[:, None]
    sets = kept_sets(sample)
    if sets is None:
        return divided
    kept = torch.zeros_like(divided, dtype=torch.bool)
    places = np.repeat(np.arange(len(sets)), sets.counts)
    kept[torch.from_numpy(places), torch.from_numpy(sets.ids)] = True
    kept[torch.from_numpy(sets.counts == 0)] = True
    return divided.masked_fill(~kept, -torch.inf)
