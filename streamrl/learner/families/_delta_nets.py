"""Gated delta nets among layers of gated attention, with norms whose weights count from 1: what families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.delta_shape import DeltaShape
from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily
from streamrl.learner.shape import AttentionShape, ModelShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from streamrl.config.learner import LoraTarget
    from streamrl.learner.mapping import Cut

_KINDS = ("full_attention", "linear_attention")
_PERIOD = 4  # every so many-th layer has attention, where `config.json` says nothing
_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
# A family adds the row of `IN_PROJ`.
IN_PROJ = "self_attention.in_proj.weight"
OF_DELTA: Mapping[str, Entry] = {
    "self_attention.conv": ("delta_conv", ("linear_attn.conv1d.weight",)),
    "self_attention.A_log": ("rows", ("linear_attn.A_log",)),
    "self_attention.dt_bias": ("rows", ("linear_attn.dt_bias",)),
    "self_attention.out_norm.weight": ("replicated", ("linear_attn.norm.weight",)),
    "self_attention.out_proj.weight": ("columns", ("linear_attn.out_proj.weight",)),
}
IN_A_DELTA_LAYER: Mapping[str, Entry] = {
    **IN_A_LAYER,
    **OF_DELTA,
    "self_attention.linear_qkv.weight": ("gated_qkv", IN_A_LAYER["self_attention.linear_qkv.weight"][1]),
}


class DeltaNets(ModelFamily):
    """Gated delta nets in three of four layers, gated attention in the others.

    A layer of multi-token prediction (`mtp`) is neither trained nor exported.
    """

    engine = False
    served_adapters = False
    served_blocks = False
    qk_norm = True
    head_dim: ClassVar[int | None] = 256
    rotary_part = 0.25
    unbuilt = ("mtp.",)
    without_adapters: ClassVar[frozenset[LoraTarget]] = frozenset(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    )
    in_a_layer: ClassVar[Mapping[str, Entry]] = IN_A_DELTA_LAYER

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        need(path, config, "num_hidden_layers", *(f"linear_{size}" for size in _SIZES))
        layers, period = config["num_hidden_layers"], config.get("full_attention_interval", _PERIOD)
        kinds = config.get("layer_types") or [_KINDS[(layer + 1) % period > 0] for layer in range(layers)]
        if len(kinds) != layers or not set(kinds).issubset(_KINDS):
            raise UnsupportedModelError(f"{path}: layer_types={kinds}; allowed: {layers} of {', '.join(_KINDS)}")
        keys, values, key, value, kernel = (config[f"linear_{size}"] for size in _SIZES)
        if values % keys:
            raise UnsupportedModelError(f"{path}: linear_num_value_heads={values}; allowed: a multiple of {keys}")
        delta = DeltaShape(
            layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _KINDS[1]),
            keys=keys,
            values=values,
            key=key,
            value=value,
            kernel=kernel,
        )
        shape = super().read(path, {name: given for name, given in config.items() if name != "layer_types"})
        return replace(shape, delta=delta if delta.layers else None, attention=AttentionShape(gate=True))

    @classmethod
    def has_in_layer(cls, shape: ModelShape, layer: int, name: str, mixture: bool) -> bool:
        if name.startswith("self_attention."):
            return shape.is_delta(layer) == (name == IN_PROJ or name in OF_DELTA) and not name.endswith(".bias")
        return cls.has(shape, name, mixture)

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        from streamrl.learner.delta_net import use_delta_net

        use_delta_net(layer)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        import torch

        from streamrl.learner.mapping import Cut, by_group

        def sizes(shape: ModelShape) -> tuple[int, int, int]:
            """Of a head's query with its gate, key, value; rows of the first are [query, gate] of each head."""
            return 2 * shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim

        def join_qkv(shape: ModelShape, pieces: Any) -> Any:
            """[queries, their gates, key, value] of each group."""
            groups = pieces[1].size(0) // shape.head_dim
            query = pieces[0].unflatten(0, (groups, -1, 2, shape.head_dim)).transpose(1, 2).flatten(1, 3)
            return torch.cat([query, *(piece.unflatten(0, (groups, -1)) for piece in pieces[1:])], 1).flatten(0, 1)

        def split_qkv(shape: ModelShape, part: Any) -> list[Any]:
            query, *others = part.unflatten(0, (-1, sum(sizes(shape)))).split(sizes(shape), 1)
            query = query.unflatten(1, (2, -1, shape.head_dim)).transpose(1, 2).flatten(0, 3)
            return [query, *(other.flatten(0, 1) for other in others)]

        return {
            "gated_qkv": Cut(0, join_qkv, split_qkv),
            "delta_conv": by_group(mixed, key_heads),
        }

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        given = {**cls.megatron(shape), "apply_layernorm_1p": True}
        return {key: value for key, value in given.items() if key != "layernorm_zero_centered_gamma"}

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        fields: dict[str, Any] = {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
        fields["linear_attention_freq"] = [int(shape.is_delta(layer)) for layer in range(shape.layers)]
        if (delta := shape.delta) is not None:
            heads = {"linear_num_key_heads": delta.keys, "linear_num_value_heads": delta.values}
            widths = {"linear_key_head_dim": delta.key, "linear_value_head_dim": delta.value}
            fields |= {**heads, **widths, "linear_conv_kernel_dim": delta.kernel}
        return fields


def delta_of(shape: ModelShape) -> DeltaShape:
    """The delta nets' sizes, of a model that has them."""
    assert shape.delta is not None
    return shape.delta


def mixed(shape: ModelShape) -> tuple[int, int, int]:
    """Channels of the convolution: all queries, all keys, all values."""
    delta = delta_of(shape)
    return delta.keys * delta.key, delta.keys * delta.key, delta.values * delta.value


def key_heads(shape: ModelShape) -> int:
    """Groups of heads: a key head with its value heads."""
    return delta_of(shape).keys
