"""Group-relative advantages: what each answer of a prompt is worth beside its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def group_advantages(
    rewards: Tensor,
    valid: Tensor,
    config: AdvantageConfig,
    lengths: Tensor | None = None,
    branches: Sequence[int] = (),
) -> Tensor:
    """`A_i = (R_i - baseline_i) / (std_g R + eps)` of one group of S samples: [S], dtype of the rewards.

    rewards: float32 or float64 [S], finite; valid: bool [S], False for placeholders, which get 0 and enter
    neither baseline nor deviation; lengths: int64 [S], trained tokens, for a baseline that reads them. A group without
    signal (a group of one among them) is 0 exactly, so that the rounding of its mean is never divided by `eps`.

    branches: samples of each rollout; (): one each. R_i is the reward of a rollout, that of its last sample, and each
    rollout counts once. Its samples have its A_i; one whose own reward R_ij is another has
    `A_i + (R_ij - R_i) / (std_g R + eps)`.

    Raises ValueError when the shapes do not fit, or the baseline needs the lengths and there are none.

    Source: GRPO (arXiv:2402.03300); `std: none` is Dr. GRPO (arXiv:2503.20783).

    >>> both = torch.tensor([True, True])
    >>> group_advantages(torch.tensor([1.0, 0.0]), both, AdvantageConfig(eps=0.0))
    tensor([ 1., -1.])
    >>> group_advantages(torch.tensor([1.0, 1.0, 0.0]), both[[0, 0, 0]], AdvantageConfig(eps=0.0), branches=(2, 1))
    tensor([ 1.,  1., -1.])
    """
    if rewards.ndim != 1 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and valid {list(valid.shape)} must both be [S]")
    baseline = baseline_of(config)
    if baseline.needs_lengths and lengths is None:
        raise ValueError(f"lengths is None, algo.advantage.baseline={config.baseline} needs it")
    if branches:
        return _of_branches(rewards, valid, config, lengths, torch.tensor(branches))
    return _of_rollouts(rewards, valid, config, lengths)[0]


def _of_branches(
    rewards: Tensor, valid: Tensor, config: AdvantageConfig, lengths: Tensor | None, branches: Tensor
) -> Tensor:
    """As `group_advantages`; branches: int64 [G]."""
    if int(branches.min()) < 1 or int(branches.sum()) != len(rewards):
        raise ValueError(f"branches {branches.tolist()} must be at least 1 each, and {len(rewards)} together")
    last = branches.cumsum(0) - 1
    rollout = torch.arange(len(branches)).repeat_interleave(branches)
    summed = None if lengths is None else torch.zeros_like(branches).index_add(0, rollout, lengths)
    advantages, spread = _of_rollouts(rewards[last], valid[last], config, summed)
    beyond = (rewards - rewards[last][rollout]).double()
    most = torch.finfo(rewards.dtype).max
    own = torch.where(beyond == 0, beyond, beyond / spread).clamp(-most, most)
    return (advantages[rollout].double() + own).clamp(-most, most).to(rewards.dtype)


def _of_rollouts(
    rewards: Tensor, valid: Tensor, config: AdvantageConfig, lengths: Tensor | None
) -> tuple[Tensor, float]:
    """The advantages of rollouts [G], and std_g R + eps; infinity without signal."""
    baseline = baseline_of(config)
    advantages = torch.zeros_like(rewards)
    if not carries_signal(rewards, valid):
        return advantages, math.inf
    present = rewards[valid].double()
    count = present.numel()
    centred = present - (present / count).sum()
    # In units of the largest deviation no square under- or overflows, whatever the rewards' scale.
    unit = centred.abs().max().item()
    numerator = baseline.left(centred / unit, None if lengths is None else lengths[valid])
    if config.std == "none":
        scaled, spread = numerator * unit, 1.0
    else:
        correction = 1 if config.std == "sample" else 0
        deviation = (centred / unit).std(correction=correction)
        scaled, spread = numerator / (deviation + config.eps / unit), unit * deviation.item() + config.eps
    advantages[valid] = scaled.to(rewards.dtype)
    return advantages, spread
