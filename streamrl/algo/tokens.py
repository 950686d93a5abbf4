"""The flat token batch that every function of the algorithm reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Field = TypeVar("Field")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """The N output tokens of one micro batch, flat, in any order. Samples are whole, rollouts need not be.

    Example: two answers of 2 and 1 tokens have `sample=[0, 0, 1]`, `samples=2`, and the advantage of an
    answer is given for each of its tokens. Raises ValueError, naming the field, if shapes or dtypes do not fit.
    """

    logprobs: Tensor  # float32 or float64 [N], log pi, with gradient
    entropy: Tensor | None  # like logprobs, entropy of pi in nats; None: not measured
    behaviour: Tensor  # like logprobs, log mu; a token where it is not finite is dropped and counted
    advantages: Tensor  # like logprobs
    mask: Tensor  # bool [N], True for trained tokens; the others change nothing, whatever they hold
    staleness: Tensor  # int64 [N], >= 0, learner steps
    sample: Tensor  # int64 [N], which sample a token belongs to, 0..samples-1
    samples: int
    # int64 [N], trained tokens of the token's rollout; None: here every sample is a rollout
    rollout_tokens: Tensor | None = None
    proximal: Tensor | None = None  # like logprobs, log pi_old of the weights that the step starts from
    reference: Tensor | None = None  # like logprobs, log pi_ref
    teacher: Tensor | None = None  # like logprobs, log pi_T
    outliers: Tensor | None = None  # bool [N], tokens that `mask: second_moment` zeroes (`whole_step.Selection`)
    covariant: Tensor | None = None  # bool [N], tokens that `algo.covariance` acts on (`whole_step.Selection`)
    full_kl: Tensor | None = None  # like logprobs, with gradient, KL(pi || pi_ref) over the whole vocabulary
    reward_kl: Tensor | None = None  # like logprobs, what `algo.kl_reward` has taken off the reward, for the metric
    mean_weight: float | None = None  # of the step, before masks and discount (`importance.weight_sums`)

    def __post_init__(self) -> None:
        dtype = self.logprobs.dtype
        if dtype not in (torch.float32, torch.float64) or self.logprobs.ndim != 1:
            raise ValueError(f"logprobs is {dtype} {list(self.logprobs.shape)}, float32 or float64 [N] is needed")
        expected = {"behaviour": dtype, "advantages": dtype, "mask": torch.bool}
        expected |= {"staleness": torch.int64, "sample": torch.int64}
        optional = dict.fromkeys(("entropy", "proximal", "reference", "teacher", "full_kl", "reward_kl"), dtype)
        optional |= {"outliers": torch.bool, "covariant": torch.bool, "rollout_tokens": torch.int64}
        expected |= {name: needed for name, needed in optional.items() if getattr(self, name) is not None}
        for name, needed in expected.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != needed or tensor.shape != self.logprobs.shape:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, {needed} {list(self.logprobs.shape)} is needed"
                )

    def select(self, index: Tensor) -> TokenBatch:
        """The tokens at `index`, int64 [n], with the same sample numbers."""

        def at(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        return TokenBatch(
            logprobs=self.logprobs[index],
            entropy=at(self.entropy),
            behaviour=self.behaviour[index],
            advantages=self.advantages[index],
            mask=self.mask[index],
            staleness=self.staleness[index],
            sample=self.sample[index],
            samples=self.samples,
            rollout_tokens=at(self.rollout_tokens),
            proximal=at(self.proximal),
            reference=at(self.reference),
            teacher=at(self.teacher),
            outliers=at(self.outliers),
            covariant=at(self.covariant),
            full_kl=at(self.full_kl),
            reward_kl=at(self.reward_kl),
            mean_weight=self.mean_weight,
        )


def needed(value: Field | None, field: str, setting: str) -> Field:
    """The optional field of a batch that a setting reads. Raises ValueError, naming both, where it is None."""
    if value is None:
        raise ValueError(f"{field} is None, {setting} needs it")
    return value
