"""What experts with biases and a clamped, gated activation need in Megatron's local layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

# The sigmoid's factor in x * sigmoid(1.702 x), which is close to the Gaussian error linear unit (arXiv 1606.08415).
GAIN = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x): Megatron's own asks for a compiler."""
    return x * torch.sigmoid(GAIN * x)


class OwnedOutput(RowParallelLinear):
    """Its output is a tensor of its own: Megatron adds an expert's bias in place, which autograd forbids of a view."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def use_biased_experts(layer: ModuleSpec) -> None:
    """Let the experts of a layer that is yet to be built have biases."""
    parts: Any = layer.submodules
    assert parts.mlp.module is MoELayer
    experts = parts.mlp.submodules.experts
    assert experts.module is SequentialMLP
    experts.submodules.linear_fc2 = OwnedOutput
