"""A norm between a layer's part and the residual that it is added to: x + norm(attention(...)), x + norm(mlp(...)).

Megatron's transformer layer has no place for it. It has one for what adds the two, which is a function of its
configuration there and a module with the norm here: `self_attn_bda.norm`, `mlp_bda.norm`. So the linear layers before
it stay what they are, with their adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from streamrl.learner.norm import RMSNorm


class NormedAdd(nn.Module):
    """x + norm(part), in the place of Megatron's bias-dropout-add."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Megatron asks for the function first, and then calls it with (part, bias), residual and dropout."""
        return self._add

    def _add(self, part: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = part
        assert bias is None, "a bias would be added before the norm"
        assert dropout == 0.0, "streamrl trains without dropout"
        return residual + self.norm(output)


def add_norms(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Put a norm behind attention and MLP of a layer that is yet to be built."""
    parts: Any = layer.submodules
    parts.self_attn_bda = ModuleSpec(NormedAdd, params={"config": config})
    parts.mlp_bda = ModuleSpec(NormedAdd, params={"config": config})
