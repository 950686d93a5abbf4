"""`params_norm` and `grad_zeros`: what all ranks' shards of parameters and gradients are together, in every layout.

Each parameter counts once, as in Megatron's gradient norm: not the second of a shared one, nor copies on
tensor-parallel ranks. A pad of the vocabulary is no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from streamrl.learner.shape import ModelShape


def pads(shape: ModelShape, tensor_parallel: int) -> int:
    """Entries of the embedding and the output layer, over all ranks, that pad the vocabulary."""
    rows = shape.padded_vocabulary(tensor_parallel) - shape.vocabulary
    return rows * shape.hidden * (1 if shape.tied else 2)


class ParamsMetrics:
    """The metrics of one optimizer. Every method is collective, and a pass over what this rank trains."""

    def __init__(self, optimizer: MegatronOptimizer, pads: int, device: torch.device) -> None:
        """`pads`: of the trained parameters, whose gradients are zero and do not count."""
        self._optimizer = optimizer
        self._pads = pads
        self._device = device
        self._zeros = math.nan

    def observe_gradients(self) -> None:
        """Count the zeros among the gradients of an update, when they are ready."""
        nonzero, entries = self._summed(_nonzero).tolist()
        self._zeros = 1.0 - nonzero / max(1.0, entries - self._pads)

    def metrics(self) -> dict[str, float]:
        """`params_norm` as the parameters are now, `grad_zeros` of the last update."""
        return {"params_norm": math.sqrt(float(self._summed(_squares)[0])), "grad_zeros": self._zeros}

    def _summed(self, local: Callable[[MegatronOptimizer], tuple[Tensor | int, ...]]) -> Tensor:
        """Float64, over the ranks that share each part's parameters; parts that are shared alike in one collective."""
        parts = self._optimizer.chained_optimizers
        sums = [torch.tensor([float(value) for value in local(part)], dtype=torch.float64) for part in parts]
        groups = [part.get_grad_stats_parallel_group() for part in parts]
        if len(parts) > 1 and self._optimizer.grads_states_parallel_group_is_shared():
            sums, groups = [torch.stack(sums).sum(0)], groups[:1]
        total = torch.zeros(len(sums[0]), dtype=torch.float64)
        for each, group in zip(sums, groups, strict=True):
            moved = each.to(self._device)
            dist.all_reduce(moved, group=group)
            total += moved.cpu()
        return total


def _nonzero(part: MegatronOptimizer) -> tuple[Tensor | int, ...]:
    """Gradient entries of this rank that are not zero, and all of them."""
    gradients = part.get_main_grads_for_grad_norm()
    counts = [torch.count_nonzero(gradient) for gradient in gradients]
    return torch.stack(counts).sum() if counts else 0, sum(gradient.numel() for gradient in gradients)


def _squares(part: MegatronOptimizer) -> tuple[Tensor | int, ...]:
    """The sum of the squares of this rank's parameters."""
    group = getattr(part, "tp_group", None)
    parameters = [
        parameter.detach()
        for parameter in part.get_parameters()
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group)
    ]
    squares = [torch.linalg.vector_norm(each, dtype=torch.float32).double() ** 2 for each in parameters]
    return (torch.stack(squares).sum() if squares else 0,)
