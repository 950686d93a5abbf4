"""Attention over the segments of a packed row, in the place of a transformers model's own.

    attention module ──query, key, value──▶ `attend` ──the row that its model reads──▶ `PackedAttention`

transformers asks a registry for the function that its attention modules call, by a name in their configuration, and
makes no mask for one whose masks it does not know. So a row holds a shared prompt once, as in Megatron's layers, and
no mask of the whole row is made.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor, nn

from streamrl.learner.attention import PackedAttention, PackedSegments
from streamrl.learner.sink_attention import SinkAttention

# The name in transformers' registry.
NAME = "streamrl_segments"

# Arguments of attention functions that say nothing of what is computed; others must be None.
_IGNORED = frozenset(
    [
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    ]
)


class UnknownAttention(Exception):
    """A model's attention has something of its own, which the text names."""


class Reading:
    """Which row the modules of a model read now: each of them has this object as `reading`."""

    def __init__(self) -> None:
        self.row: PackedSegments | None = None
        self.windows: set[int] = set()  # that attention was given; those of masks alone are not known here


def register(model: nn.Module) -> Reading:
    """Make `NAME` known to transformers, and have every module of the model find the row that it reads."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    reading: Any = Reading()  # torch's modules take any object as an attribute, their types do not
    for module in model.modules():
        module.reading = reading
    return reading


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, heads, T, d], key [1, groups, T, d], value [1, groups, T, v]; gives
    [1, T, heads, v].

    sliding_window: tokens that a token sees, itself included. Raises UnknownAttention for what is not computed here.
    """
    unknown = sorted(name for name, given in rest.items() if given is not None and name not in _IGNORED)
    if attention_mask is not None or is_causal is False or unknown:
        raise UnknownAttention(unknown[0] if unknown else "a mask of its own")
    reading: Any = module.reading
    if sliding_window is not None:
        reading.windows.add(sliding_window)
    scale = scaling if scaling is not None else 1 / math.sqrt(query.size(-1))
    packed = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attended = _core(scale, sliding_window)(*packed, packed_seq_params=reading.row)
    return attended.reshape(1, query.size(2), query.size(1), -1), None


class _Windowed(SinkAttention):
    """SinkAttention without Megatron's configuration, and without sinks."""

    def __init__(self, scale: float, window: int) -> None:
        nn.Module.__init__(self)
        self.scale, self._window, self._sliced, self.softmax_offset = scale, window - 1, False, None


class _Plain(PackedAttention):
    """PackedAttention without Megatron's configuration."""

    def __init__(self, scale: float) -> None:
        nn.Module.__init__(self)
        self.scale, self._sliced = scale, False


@functools.cache
def _core(scale: float, window: int | None) -> PackedAttention:
    return _Plain(scale) if window is None else _Windowed(scale, window)
