"""Self-attention whose rotary embedding is another one in layers with a window.

Megatron hands the same table of angles to all layers. Here its columns are those of both embeddings, side by side, and
each layer takes its own (`ModelShape.frequencies`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class RopeByLayer(SelfAttention):
    """Megatron's, with the angles of its kind of layer; pairs of dimensions are half a head apart."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **rest: Any) -> Any:
        """rotary_pos_emb: [T, 1, 1, 2 * d], both halves with the angles of layers without a window before the others'.

        The rest is Megatron's, and so is what is returned.
        """
        config = self.config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        angles = rotary_pos_emb.chunk(2, -1)[0].chunk(2, -1)[int(windowed)]
        return super().forward(*args, rotary_pos_emb=torch.cat([angles, angles], -1), **rest)
