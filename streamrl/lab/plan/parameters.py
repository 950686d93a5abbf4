"""How many parameters a rank of the learner, a server's rank and the whole model have, counted from the shape.

    stage 0: embedding | layers ... | last stage: layers | norm, output layer

Tensor parallelism cuts every matrix and leaves norms whole; expert parallelism cuts the experts of a layer. The
counts are those of the modules that `learner/model.py` builds.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from streamrl.config.learner import LayoutConfig, LoraConfig
from streamrl.learner.layout_fit import stage_layers
from streamrl.learner.shape import ModelShape, adapter_sizes


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters on one rank. Example: `Parameters(dense=4_100_000_000)` is a rank of Qwen2.5-32B with tensor=8."""

    dense: int = 0  # their copies are on all data-parallel and context ranks
    expert: int = 0  # their copies are on the ranks with the same experts
    adapters: int = 0  # low-rank ones; with them the others are frozen
    tower: int = 0  # of `dense` those of a vision tower, which may be frozen

    @property
    def all(self) -> int:
        return self.dense + self.expert + self.adapters

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def whole_model(shape: ModelShape) -> int:
    """Parameters of the Hugging Face folder, without padding: what is published."""
    if (counts := shape.family.counts(shape)) is not None:
        return counts.parameters
    layers = sum((_layer(shape, index, _WHOLE) for index in range(shape.layers)), Parameters())
    ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return layers.all + ends + shape.hidden + _tower(shape)


def whole_adapters(shape: ModelShape, settings: LoraConfig) -> int:
    """Parameters of all adapters: what is published where they alone are."""
    return sum(_adapters(shape, index, _WHOLE, settings) for index in range(shape.layers))


def of_stage(shape: ModelShape, layout: LayoutConfig, stage: int, adapters: LoraConfig) -> Parameters:
    """Parameters of one rank of pipeline stage `stage`, from 0."""
    if (counts := shape.family.counts(shape)) is not None:
        return Parameters(dense=counts.parameters)
    counted = Parameters()
    for layer in layers_of(shape, layout, stage):
        counted += _layer(shape, layer, layout)
        counted += Parameters(adapters=_adapters(shape, layer, layout, adapters))
    first, last = stage == 0, stage == layout.pipeline - 1
    table = shape.padded_vocabulary(layout.tensor) // layout.tensor * shape.hidden
    tables = first + last - (first and last and shape.tied)
    tower = _tower(shape) if first else 0  # whole on every rank
    return counted + Parameters(dense=tables * table + last * shape.hidden + tower, tower=tower)


def of_critic(shape: ModelShape, layout: LayoutConfig, stage: int) -> Parameters:
    """Those of a critic of this shape: in place of the output layer it has one row."""
    first, last = stage == 0, stage == layout.pipeline - 1
    has_table = last and not (first and shape.tied)
    table = shape.padded_vocabulary(layout.tensor) // layout.tensor * shape.hidden
    return of_stage(shape, layout, stage, LoraConfig()) + Parameters(dense=last * shape.hidden - has_table * table)


def _tower(shape: ModelShape) -> int:
    return 0 if shape.vision is None else shape.vision.parameters


def largest_layer(shape: ModelShape, layout: LayoutConfig) -> int:
    """Parameters of the largest layer on one rank."""
    return max(_layer(shape, layer, layout).all for layer in range(shape.layers))


def outside_layers(shape: ModelShape, layout: LayoutConfig) -> int:
    """Those of one rank without pipeline stages that are in no layer: embedding, last norm, output layer."""
    inside = sum(_layer(shape, layer, layout).all for layer in range(shape.layers))
    return of_stage(shape, layout, 0, LoraConfig()).all - inside


def layers_of(shape: ModelShape, layout: LayoutConfig, stage: int) -> list[int]:
    """The layers of a stage, from 0: with virtual stages those of each of its chunks, `pipeline` chunks apart."""
    counts = stage_layers(shape.layers, layout)
    if layout.virtual == 1:
        first = sum(counts[:stage])
        return list(range(first, first + counts[stage]))
    chunk = counts[stage] // layout.virtual
    starts = [(turn * layout.pipeline + stage) * chunk for turn in range(layout.virtual)]
    return [layer for start in starts for layer in range(start, start + chunk)]


def of_server_rank(shape: ModelShape, tensor: int) -> int:
    """Parameters of one rank of a server: key and value heads are repeated where there are more ranks than heads."""
    if (counts := shape.family.counts(shape)) is not None:
        return -(-counts.parameters // tensor)
    layers = 0
    for layer in range(shape.layers):
        counted = _layer(shape, layer, LayoutConfig(tensor=tensor, expert_tensor=tensor))
        layers += counted.all
        if shape.has_attention(layer):
            layers += _attention_of_server(shape, tensor) - shape.attention_weights(tensor)
    ends = (1 if shape.tied else 2) * shape.padded_vocabulary(tensor) // tensor * shape.hidden
    return layers + ends + shape.hidden + _tower(shape) // tensor


def adapters_of_server_rank(shape: ModelShape, tensor: int, settings: LoraConfig) -> int:
    """Parameters of one adapter on one rank of a server, which cuts them as the learner's ranks do."""
    return sum(_adapters(shape, layer, LayoutConfig(tensor=tensor), settings) for layer in range(shape.layers))


def quantised_of_server_rank(shape: ModelShape, tensor: int) -> int:
    """Those of them that `generate.quantization` is about: the projections of attention, MLPs and experts."""
    layers = shape.layers * _attention_of_server(shape, tensor)
    for layer in range(shape.layers):
        moe = shape.moe if shape.has_experts(layer) else None
        width = shape.ffn if moe is None else moe.experts * moe.ffn + moe.shared_ffn
        layers += 3 * shape.hidden * width // tensor
    return layers


def _attention_of_server(shape: ModelShape, tensor: int) -> int:
    if shape.latent is not None:
        return shape.attention_weights(tensor)
    groups, heads = max(1, shape.groups // tensor), shape.heads // tensor
    gates = heads if shape.attention.gate else 0
    return (heads + 2 * groups + heads + gates) * shape.head_dim * shape.hidden


_WHOLE = LayoutConfig()


def _layer(shape: ModelShape, layer: int, layout: LayoutConfig) -> Parameters:
    """One layer on one rank."""
    dense = _mixer(shape, layer, layout.tensor) + shape.family.norms_in_a_layer * shape.hidden
    if not shape.has_mlp(layer):
        return Parameters(dense=dense)
    column = shape.mlp_matrices * shape.hidden  # with the rows that go with it
    if not shape.has_experts(layer):
        return Parameters(dense=dense + column * shape.ffn // layout.tensor)
    assert shape.moe is not None
    router = shape.moe.experts * (shape.hidden + shape.moe.sigmoid)  # with a bias for each expert
    dense += column * shape.moe.shared_ffn // layout.tensor + shape.hidden * shape.moe.shared_gate
    experts = shape.moe.experts // layout.expert * column * shape.moe.ffn // layout.expert_tensor
    if shape.attention.bias:
        router += shape.moe.experts
        experts += shape.moe.experts // layout.expert * (2 * shape.moe.ffn // layout.expert_tensor + shape.hidden)
    return Parameters(dense=dense + router, expert=experts)


def _mixer(shape: ModelShape, layer: int, tensor: int) -> int:
    """What mixes tokens in one layer on one of so many tensor-parallel ranks, without the norms around it."""
    weights, delta, mamba = shape.mixer_weights(layer, tensor), shape.delta, shape.mamba
    if delta is not None and shape.is_delta(layer):
        return weights + (delta.channels * delta.kernel + 2 * delta.values) // tensor + delta.value
    if mamba is not None and shape.is_mamba(layer):
        return weights + (mamba.channels * (mamba.kernel + 1) + 3 * mamba.heads + mamba.inner) // tensor
    if not shape.has_attention(layer):
        return 0
    projected = (shape.heads + 2 * shape.groups) * shape.head_dim // tensor
    weights += projected if shape.qkv_bias else 0
    weights += 2 * shape.head_dim if shape.qk_norm else 0
    weights += shape.heads // tensor if shape.attention.sinks else 0
    weights += shape.hidden if shape.attention.bias else 0
    if shape.latent is not None:  # norms
        weights += shape.latent.rank + (shape.latent.query_rank or 0)
    return weights


def _adapters(shape: ModelShape, layer: int, layout: LayoutConfig, settings: LoraConfig) -> int:
    """Adapter parameters of one layer on one rank: A and B of each projection, one of them cut (learner/lora.py)."""
    if settings.rank == 0:
        return 0
    sizes = adapter_sizes(shape)
    total = 0
    for target in settings.targets:
        if target in ("linear_fc1", "linear_fc2") and shape.has_experts(layer):
            continue  # refused by the learner; `fit.py` says so
        projections, inputs, outputs = sizes[target]
        by_rows = target in ("linear_qkv", "linear_fc1")  # B is cut; else A
        inputs, outputs = (inputs, outputs // layout.tensor) if by_rows else (inputs // layout.tensor, outputs)
        total += settings.rank * (projections * inputs + outputs)
    return total
