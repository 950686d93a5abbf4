"""Core attention with a window on some layers, and with a sink: a score of each head's own that has no value.

    softmax([scores of what is seen, sink]) without its last column, times the values

Both are read of Megatron's configuration: `window_size`, `window_attn_skip_freq`, `softmax_type`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import pad

from streamrl.learner.attention import PackedAttention

# Dimensions that queries and keys get for the sink: two are needed, and kernels like multiples of eight.
SINK_WIDTH = 8


class SinkAttention(PackedAttention):
    """PackedAttention with what the configuration says of windows and sinks; through SDPA on every device."""

    takes_varlen = False

    def __init__(  # noqa: PLR0917 (Megatron's signature)
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection, **rest)
        self._tensor_parallel = None if pg_collection is None else pg_collection.tp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if windowed and config.window_size else None  # tokens before a token
        self.softmax_offset: nn.Parameter | None = None  # as Megatron calls it, [heads of this rank]
        if config.softmax_type == "learnable":
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            ranks = 1 if self._tensor_parallel is None else self._tensor_parallel.size()
            heads = config.num_attention_heads // ranks
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dtype = query.dtype
        if query.device.type == "cpu":
            query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        mask = self._seen(query, key, mask)
        if self.softmax_offset is not None:
            query, key, value, mask = self._with_sink(query, key, value, mask)
        return super()._attend(query, key, value, mask).to(dtype)

    def _seen(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask with the window. What is before a segment's first token are its last positions before it."""
        if self._window is None:
            return mask
        queries, keys = query.size(2), key.size(2)
        places = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        near = places.triu(keys - queries - self._window)
        # A pad sees itself: a row of the softmax without anything to see is no number, nor is its gradient.
        own = places.triu(keys - queries).tril(keys - queries)
        return near.tril(keys - queries) if mask is None else (mask & near) | own

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sink as one more key, which everybody sees, with a value of zeros.

        Queries have the sink in two more dimensions; the sink's key has there what makes the product with the scale 1,
        as a number of the dtype and what that has been rounded by. Other keys have zeros.
        """
        assert self.softmax_offset is not None
        if mask is None:
            mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        count, heads, queries, _ = query.shape
        sinks = self.softmax_offset.to(query.dtype).view(1, heads, 1, 1).expand(count, heads, queries, 2)
        query = torch.cat([query, sinks, query.new_zeros(count, heads, queries, SINK_WIDTH - 2)], -1)
        inverse = torch.tensor(1 / self.scale, dtype=torch.float64)
        first = inverse.to(query.dtype)
        sink_key = query.new_zeros(*key.shape[:2], 1, key.size(3) + SINK_WIDTH)
        sink_key[..., key.size(3)] = first
        sink_key[..., key.size(3) + 1] = (inverse - first).to(query.dtype)
        key = torch.cat([pad(key, (0, SINK_WIDTH)), sink_key], 2)
        return query, key, pad(value, (0, 0, 0, 1)), pad(mask, (0, 1), value=True)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a checkpoint is told: a rank has its heads' sinks."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tensor_parallel,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded
