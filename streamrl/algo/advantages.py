"""Group-relative advantages: what each answer of a prompt is worth beside its siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algo.baselines import baseline_of
from streamrl.config.algo import AdvantageConfig


def carries_signal(rewards: Tensor, valid: Tensor) -> bool:
    """Whether the valid samples of a group have at least two different rewards.

    rewards: float [G]; valid: bool [G], False for placeholders. A group without signal has advantage 0
    everywhere and teaches nothing; the caller counts it.
    """
    present = rewards[valid]
    return present.numel() > 0 and bool(present.min() != present.max())


def group_advantages(rewards: Tensor, valid: Tensor, config: AdvantageConfig, lengths: Tensor | None = None) -> Tensor:
    """`A_i = (R_i - baseline_i) / (std_g R + eps)` of one group: [G], dtype of the rewards.

    rewards: float32 or float64 [G], finite; valid: bool [G], False for placeholders, which get 0 and enter
    neither baseline nor deviation; lengths: int64 [G], trained tokens, for a baseline that reads them. A group without
    signal (a group of one among them) is 0 exactly, so that the rounding of its mean is never divided by `eps`. Raises
    ValueError when the shapes do not fit, or the baseline needs the lengths and there are none.

    Source: GRPO (arXiv:2402.03300); `std: none` is Dr. GRPO (arXiv:2503.20783).

    >>> group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([True, True]), AdvantageConfig(eps=0.0))
    tensor([ 1., -1.])
    """
    if rewards.ndim != 1 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and valid {list(valid.shape)} must both be [G]")
    baseline = baseline_of(config)
    if baseline.needs_lengths and lengths is None:
        raise ValueError(f"lengths is None, algo.advantage.baseline={config.baseline} needs it")
    advantages = torch.zeros_like(rewards)
    if not carries_signal(rewards, valid):
        return advantages
    present = rewards[valid].double()
    count = present.numel()
    centred = present - (present / count).sum()
    # In units of the largest deviation no square under- or overflows, whatever the rewards' scale.
    unit = centred.abs().max().item()
    numerator = baseline.left(centred / unit, None if lengths is None else lengths[valid])
    if config.std == "none":
        scaled = numerator * unit
    else:
        correction = 1 if config.std == "sample" else 0
        deviation = (centred / unit).std(correction=correction)
        scaled = numerator / (deviation + config.eps / unit)
    advantages[valid] = scaled.to(rewards.dtype)
    return advantages
