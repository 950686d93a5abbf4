"""How the rows of a transformers model are made: found out by asking the model itself, once, when it is built.

    shared   segments, a group's prompt once    attention by `segments.py`
    packed   whole sequences                    transformers' masks, by positions that restart
    alone    one sequence a row                 whatever mixes its tokens: a state, a convolution, biases by distance

A way is right where no token's gradient reaches a token that it must not see, and an answer's does reach its prompt.
Such gradients are 0 or not: no tolerance decides. Weights are random then. The first way that is right is taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.config.file import ConfigError
from streamrl.learner.attention import PackedSegments, describe_row
from streamrl.learner.whole.segments import NAME

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """One of the three. Example: `Way("packed", shares_prompts=False, one_a_row=False)`."""

    name: str
    shares_prompts: bool
    one_a_row: bool


SHARED = Way("shared", shares_prompts=True, one_a_row=False)
PACKED = Way("packed", shares_prompts=False, one_a_row=False)
ALONE = Way("alone", shares_prompts=False, one_a_row=True)

# The rows that tell: (start, length, prefix start, prefix length) of each segment.
_ROWS: dict[Way, list[list[int]]] = {
    SHARED: [[0, 3, 0, 0], [3, 2, 0, 3], [5, 2, 0, 3], [7, 3, 0, 0]],
    PACKED: [[0, 3, 0, 0], [3, 4, 0, 0]],
    ALONE: [[0, 4, 0, 0]],
}

# Kinds of layers whose windows `segments.py` knows: those of other kinds are in transformers' masks alone.
_KINDS = {"full_attention", "sliding_attention"}

# (ids, positions, row) -> what the model makes of every token, [T, any]
Forward = Callable[[Tensor, Tensor, PackedSegments], Tensor]


def find_way(model: Any, forward: Forward, has_positions: bool) -> Way:
    """The first way that is right for a transformers model, which then has its attention for it.

    Raises ConfigError where its tokens see later ones.
    """
    own = model.config._attn_implementation
    device = next(model.parameters()).device
    for way in _possible(model, has_positions):
        model.set_attn_implementation(NAME if way is SHARED else own)
        try:
            if _is_right(way, model.get_input_embeddings(), forward, device):
                if way is not SHARED or _knows_windows(model):
                    return way
                log.info("%s takes no shared rows: its windows are in its masks alone", type(model).__name__)
        except Exception as error:  # whatever such rows bring about in a model that takes none of them
            if way is ALONE:
                raise
            log.info("%s takes no %s rows: %s: %s", type(model).__name__, way.name, type(error).__name__, error)
    raise ConfigError(
        f"model.path: {type(model).__name__} has tokens that see later ones, and no policy of next tokens is made of "
        "it; allowed: a causal language model"
    )


def _possible(model: Any, has_positions: bool) -> Iterator[Way]:
    if has_positions and not model._is_stateful:
        if model._supports_attention_backend and set(getattr(model.config, "layer_types", None) or ()) <= _KINDS:
            yield SHARED
        yield PACKED
    yield ALONE


def _knows_windows(model: Any) -> bool:
    """Whether attention, which sees no mask in shared rows, was given the window of a model that has one."""
    config = model.config
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    hides = window and window < getattr(config, "max_position_embeddings", math.inf)
    windowed = hides and (kinds is None or "sliding_attention" in kinds)
    return not windowed or bool(model.reading.windows)


def _is_right(way: Way, embedding: Any, forward: Forward, device: torch.device) -> bool:
    segments = np.array(_ROWS[way], np.int64)
    tokens = int(segments[:, 1].sum())
    positions = np.concatenate([np.arange(prefix, prefix + length) for _, length, _, prefix in segments])
    made: list[Tensor] = []
    handle = embedding.register_forward_hook(lambda module, given, output: made.append(output))
    try:
        ids = torch.arange(tokens, device=device)[None] % int(embedding.weight.size(0))
        with torch.enable_grad():
            output = forward(ids, torch.from_numpy(positions).to(device)[None], describe_row(segments, device))
    finally:
        handle.remove()
    return all(_sees_what_it_should(output, made[0], segment, way) for segment in segments.tolist())


def _sees_what_it_should(output: Tensor, embedded: Tensor, segment: list[int], way: Way) -> bool:
    """Of a segment's first and last token: all that they see is before them.

    In a row of several sequences the one right before them is seen, too. Alone a model may begin with weights of 0.
    """
    start, length, prefix_start, prefix = segment
    for place in (start, start + length - 1):
        (gradient,) = torch.autograd.grad(
            output[place].float().sum(), embedded, retain_graph=True, materialize_grads=True
        )
        seen = set(gradient.view(-1, gradient.size(-1)).any(1).nonzero().flatten().tolist())
        may = {*range(prefix_start, prefix_start + prefix), *range(start, place + 1)}
        before = [place - 1] if place > start else [prefix_start + prefix - 1][:prefix]
        if not seen <= may or not (way.one_a_row or seen.issuperset(before)):
            return False
    return True
