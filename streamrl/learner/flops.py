"""Floating-point operations that training asks of a model, counted from its shape and from what it trains. Pure.

    forward    2 a weight and token, 4 heads x head_dim a layer and pair of a token with one that it sees
    backward   twice that; of frozen weights once: they need the gradient of their input alone

Model FLOPs, as in PaLM (arXiv 2204.02311, appendix B): activations that are computed again and pads count nothing. A
token meets `top_k` experts, a shared prompt is one sequence of tokens, and the output layer is at trained tokens alone.
Of a vision tower the products with weights count, not its attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

from streamrl.config.learner import LoraConfig
from streamrl.learner.packing import MicroBatch
from streamrl.learner.shape import ModelShape, adapter_sizes


@dataclass(frozen=True, slots=True)
class Work:
    """What rows ask of a model.

    Example: a prompt of 2 tokens and an answer of 3, of which 3 are trained, are `Work(tokens=4, pairs=10, targets=3)`:
    nothing reads the last token.
    """

    tokens: int = 0
    pairs: int = 0  # of a token and one that it sees, itself included
    targets: int = 0  # trained tokens
    images: int = 0  # tokens of images

    def __add__(self, other: Work) -> Work:
        return Work(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def work_of(micro_batches: Iterable[MicroBatch], image_token: int | None = None) -> Work:
    """The work in packed rows; one without a trained token only keeps a rank company, and counts nothing."""
    return sum((_of_row(micro, image_token) for micro in micro_batches if len(micro.targets)), Work())


def training_flops(shape: ModelShape, lora: LoraConfig, work: Work, *, freeze_vision: bool = False) -> float:
    """FLOPs of one forward and backward pass over all ranks."""
    return _of_text(shape, lora, work) + _of_images(shape, work, frozen=freeze_vision or lora.rank > 0)


def _of_images(shape: ModelShape, work: Work, *, frozen: bool) -> float:
    if shape.vision is None:
        return 0.0
    return (1.0 if frozen else 3.0) * 2 * shape.vision.products * work.images


def _of_text(shape: ModelShape, lora: LoraConfig, work: Work) -> float:
    by_token, by_pair = 2 * _weights_met(shape) * work.tokens, 4 * _pair(shape) * work.pairs
    by_target = 2 * shape.hidden * shape.vocabulary * work.targets
    if not lora.rank:
        return 3.0 * (by_token + by_pair + by_target)
    adapters = 2 * _adapter_weights(shape, lora) * work.tokens
    return 2.0 * (by_token + by_target) + 3.0 * (by_pair + adapters)


def _of_row(micro: MicroBatch, image_token: int | None) -> Work:
    length, prefix = micro.segments[:, 1], micro.segments[:, 3]
    pairs = int(np.sum(length * prefix + length * (length + 1) // 2))
    starts = micro.segments[[segment for segment, _ in micro.images], :2]
    images = sum(int((micro.ids[start : start + count] == image_token).sum()) for start, count in starts)
    return Work(int(length.sum()), pairs, len(micro.targets), images)


def _weights_met(shape: ModelShape) -> int:
    """Weights of all layers' matrices that one token meets.

    Example: of Qwen3-30B-A3B those of 8 of the 128 experts of each layer, its router and its attention.
    """
    if (counts := shape.family.counts(shape)) is not None:
        return counts.met
    mixers = sum(shape.mixer_weights(layer) + _state(shape, layer) for layer in range(shape.layers))
    of_experts = sum(shape.has_experts(layer) for layer in range(shape.layers))
    of_dense = sum(shape.has_mlp(layer) for layer in range(shape.layers)) - of_experts
    column = shape.mlp_matrices * shape.hidden
    weights = mixers + of_dense * column * shape.ffn
    if shape.moe is not None:
        experts = column * (shape.moe.top_k * shape.moe.ffn + shape.moe.shared_ffn)
        weights += of_experts * (experts + shape.hidden * (shape.moe.experts + shape.moe.shared_gate))
    return weights


def _state(shape: ModelShape, layer: int) -> int:
    """What the state of a layer counts: for each token an entry is written and read once, of a delta net read twice."""
    delta, mamba = shape.delta, shape.mamba
    if delta is not None and shape.is_delta(layer):
        return 3 * delta.values * delta.key * delta.value
    return 2 * mamba.inner * mamba.state if mamba is not None and shape.is_mamba(layer) else 0


def _pair(shape: ModelShape) -> int:
    """Products of scores, and as many of values, by all heads of all layers with attention for one pair."""
    layers = sum(shape.has_attention(layer) for layer in range(shape.layers))
    return layers * shape.heads * (shape.head_dim + shape.value_dim) // 2


def _adapter_weights(shape: ModelShape, lora: LoraConfig) -> int:
    sizes = adapter_sizes(shape)
    each = (count * inputs + outputs for count, inputs, outputs in (sizes[target] for target in lora.targets))
    return shape.layers * lora.rank * sum(each)
