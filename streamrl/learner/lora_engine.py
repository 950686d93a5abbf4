"""Low-rank adapters on Transformer Engine's linear layers; imported only where it is installed.

Its layer that normalises and then projects has no output in which the adapter could find its input: the two are
taken apart, into Transformer Engine's norm and its plain linear layer, as Megatron's local layers are.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from torch import Tensor

from streamrl.config.learner import LoraConfig, LoraTarget
from streamrl.learner.lora import ColumnAdapter, RowAdapter

NORM = TENorm
NORMALISING = TELayerNormColumnParallelLinear


class AdaptedEngineColumn(TEColumnParallelLinear, ColumnAdapter):
    """The layer that cuts its outputs."""

    def __init__(self, input_size: int, *args: Any, target: LoraTarget, settings: LoraConfig, **kwargs: Any) -> None:
        super().__init__(input_size, *args, **kwargs)
        self.input_size = input_size
        self.add_adapter(target, settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, in] -> ([s, b, out of this rank], bias where it is left to the caller)."""
        output, bias = super().forward(x)
        return self.adapt(x, output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self.shards(self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets, metadata)


class AdaptedEngineRow(TERowParallelLinear, RowAdapter):
    """The layer that cuts its inputs."""

    def __init__(self, input_size: int, *args: Any, target: LoraTarget, settings: LoraConfig, **kwargs: Any) -> None:
        super().__init__(input_size, *args, **kwargs)
        self.input_size = input_size
        self.add_adapter(target, settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, in of this rank] -> ([s, b, out], bias where it is left to the caller)."""
        output, bias = super().forward(x)
        return self.adapt(x, output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self.shards(self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets, metadata)


KINDS = {
    TEColumnParallelLinear: AdaptedEngineColumn,
    TELayerNormColumnParallelLinear: AdaptedEngineColumn,
    TERowParallelLinear: AdaptedEngineRow,
}
