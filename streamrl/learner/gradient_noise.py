"""How much of a step's gradient is signal, from the gradients that its micro batches have anyway.

With g_m a part's gradient, w_m its share of the mean that `algo.aggregation` takes, which add up to 1, G the sum of g_m
and q = sum w_m^2, unbiased for parts that are drawn independently, with E g_m = w_m E G:

    signal  |E G|^2      (|G|^2 - sum |g_m|^2) / (1 - q)
    noise   E |G - E G|^2   (sum |g_m|^2 - q |G|^2) / (1 - q)

Source: McCandlish et al., appendix A.1 (arXiv:1812.06162), for parts of any share. Measured on the weight of the final
norm alone, a vector for each micro batch: norm layers tell the noise of the whole model (Gray et al.,
arXiv:2411.00999). No further pass, and no copy of a gradient buffer. What parts of one group have in common counts as
signal. A single step says little: divide means over several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from streamrl.config import Config
from streamrl.learner.model import policy_of
from streamrl.learner.parallel import fill_from_last_stage

SIGNAL, NOISE = "gradient/signal", "gradient/noise"


def signal_and_noise(whole: float, parts: float, part: float) -> tuple[float, float]:
    """(signal, noise) from |G|^2, the sum of |g_m|^2, and q < 1. Either may be negative; together they are |G|^2.

    >>> signal_and_noise(whole=4.0, parts=1.0, part=0.25)
    (4.0, 0.0)
    """
    return (whole - parts) / (1 - part), (parts - part * whole) / (1 - part)


class GradientNoise:
    """Measures the gradient noise of one model. Collective: every rank calls `observing` and `metrics`.

    Usage:
        with noise.observing(shares):
            passes.forward_backward(micro_batches, loss)
        noise.metrics()
    """

    def __init__(self, last_chunk: nn.Module, device: torch.device) -> None:
        """`last_chunk`: of this rank. On the last pipeline stage it has the final norm."""
        model = policy_of(last_chunk)
        self._sharded = bool(model.config.sequence_parallel)
        self._device = device
        self._parts: list[Tensor] = []
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._weight: Tensor | None = None  # of the norm, as passes have it
        norm = model.final_norm
        if norm is not None and norm.weight.requires_grad:
            norm.register_forward_pre_hook(self._find)
        self._watches = False

    @classmethod
    def of(cls, config: Config, last_chunk: nn.Module, device: torch.device) -> GradientNoise | None:
        """None where nobody asks for it: neither `learner.params_metrics` nor the controller of the adaptive bound."""
        asked = config.learner.params_metrics or {SIGNAL, NOISE} & set(config.replay.adaptive.signals)
        return cls(last_chunk, device) if asked else None

    @contextmanager
    def observing(self, shares: Sequence[float]) -> Iterator[None]:
        """The backward passes inside are those of a mini batch, one for each of this rank's micro batches.

        shares: of each micro batch in the mean over the mini batch of all ranks, in any unit.
        """
        self._parts, self._watches = [], True
        try:
            yield
        finally:
            self._watches = False
        self._sums = self._reduced(torch.tensor(shares, dtype=torch.float64, device=self._device))
        self._parts = []

    def metrics(self) -> dict[str, float]:
        """Signal and noise of the last mini batch that was observed; none where it had one part, or no trained norm."""
        total, squares, of_shares, shares = self._sums.tolist()
        part = of_shares / shares**2 if shares else 1.0
        if part >= 1.0 or squares == 0.0:
            return {}
        return dict(zip((SIGNAL, NOISE), signal_and_noise(total, squares, part), strict=True))

    def _find(self, norm: nn.Module, _: object) -> None:
        """The weight that a pass computes with: of a fully sharded model it is there in passes alone, always the same
        one."""
        weight = norm.get_parameter("weight")
        if weight is not self._weight:
            weight.register_hook(self._observe)
            self._weight = weight

    def _observe(self, gradient: Tensor) -> None:
        if self._watches:
            self._parts.append(gradient.detach().float().clone())

    def _reduced(self, shares: Tensor) -> Tensor:
        """float64 [4]: |G|^2, sum |g_m|^2, sum w_m^2, sum w_m, over all ranks and on each."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        if self._parts:
            parts = torch.stack(self._parts)
            if self._sharded:
                dist.all_reduce(parts, group=parallel_state.get_tensor_model_parallel_group())
            if parallel_state.get_context_parallel_world_size() > 1:
                dist.all_reduce(parts, group=parallel_state.get_context_parallel_group())
            parts = parts.double()
            whole = parts.sum(0)
            sums[1], sums[2], sums[3] = parts.square().sum(), shares.square().sum(), shares.sum()
            group = parallel_state.get_data_parallel_group()
            dist.all_reduce(whole, group=group)
            dist.all_reduce(sums, group=group)
            sums[0] = whole.square().sum()
        fill_from_last_stage(sums)
        return sums
