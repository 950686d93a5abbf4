"""The RMS norm of layers without Transformer Engine: Megatron's torch norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm, whose weight tells Megatron to sum its gradient over sequence-parallel ranks.

    With `layernorm_zero_centered_gamma` the weight counts from 1, and all is in float32 (Gemma, Qwen3-Next).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._from_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self._from_one:
            return super().forward(x)
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class PlainRMSNorm(RMSNorm):
    """Its weight counts from 0 whatever the other norms' do."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._from_one = False
