"""The family `nemotron_h`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._sigmoid_experts import SigmoidExperts
from streamrl.learner.families.base import EMBEDDING, OUTPUT, OUTSIDE_LAYERS, Entry, need_values
from streamrl.learner.mamba_shape import ATTENTION, EXPERTS, KINDS, MAMBA, MLP, MambaShape
from streamrl.learner.shape import ModelShape, MoeShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from streamrl.config.learner import LoraTarget
    from streamrl.learner.mapping import Cut

_MIXER = "self_attention."
_BEFORE: Entry = ("replicated", ("norm.weight",))
# The parameters of a layer, by what it is.
_OF_KIND: Mapping[str, Mapping[str, Entry]] = {
    MAMBA: {
        "input_layernorm.weight": _BEFORE,
        f"{_MIXER}in_proj.weight": ("mamba_in", ("mixer.in_proj.weight",)),
        f"{_MIXER}conv": ("mamba_mixed", ("mixer.conv1d.weight",)),
        f"{_MIXER}conv_bias": ("mamba_mixed", ("mixer.conv1d.bias",)),
        f"{_MIXER}A_log": ("rows", ("mixer.A_log",)),
        f"{_MIXER}dt_bias": ("rows", ("mixer.dt_bias",)),
        f"{_MIXER}D": ("rows", ("mixer.D",)),
        f"{_MIXER}norm": ("rows", ("mixer.norm.weight",)),
        f"{_MIXER}out_proj.weight": ("columns", ("mixer.out_proj.weight",)),
    },
    ATTENTION: {
        "input_layernorm.weight": _BEFORE,
        f"{_MIXER}linear_qkv.weight": ("qkv", tuple(f"mixer.{x}_proj.weight" for x in "qkv")),
        f"{_MIXER}linear_proj.weight": ("columns", ("mixer.o_proj.weight",)),
    },
    MLP: {
        "pre_mlp_layernorm.weight": _BEFORE,
        "mlp.linear_fc1.weight": ("rows", ("mixer.up_proj.weight",)),
        "mlp.linear_fc2.weight": ("columns", ("mixer.down_proj.weight",)),
    },
    EXPERTS: {
        "pre_mlp_layernorm.weight": _BEFORE,
        "mlp.router.weight": ("replicated", ("mixer.gate.weight",)),
        "mlp.router.expert_bias": ("replicated", ("mixer.gate.e_score_correction_bias",)),
        "mlp.shared_experts.linear_fc1.weight": ("rows", ("mixer.shared_experts.up_proj.weight",)),
        "mlp.shared_experts.linear_fc2.weight": ("columns", ("mixer.shared_experts.down_proj.weight",)),
    },
}

# Other names of keys in `config.json`: transformers' and SGLang's; they count before those of the published models.
_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "head_dim": "attention_head_dim",
}
_LISTS = ("layers_block_type", "layer_types")
_LETTERS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")

# Of `config.json`: what is built, which is also what a configuration without the key means.
_BUILT: Mapping[str, Any] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "moe_latent_size": None,
    "n_shared_experts": 1,
}
_EPS = 1e-5


class NemotronH(SigmoidExperts):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: each layer is one part, Mamba-2, attention without positions,
    an MLP or experts with max(x, 0)^2 for an activation.

    Its layers of multi-token prediction (`mtp`) are neither trained nor exported.
    """

    architectures = ("NemotronHForCausalLM",)
    engine = False
    served_adapters = False
    served_blocks = False
    head_dim = 128
    norms_in_a_layer = 1
    unbuilt = ("mtp.",)
    without_adapters: ClassVar[frozenset[LoraTarget]] = frozenset(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    )
    layers_prefix = "backbone.layers."
    outside_layers: ClassVar[Mapping[str, Entry]] = {
        EMBEDDING: ("vocabulary", ("backbone.embeddings.weight",)),
        "decoder.final_layernorm.weight": ("replicated", ("backbone.norm_f.weight",)),
        OUTPUT: OUTSIDE_LAYERS[OUTPUT],
    }
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        name: entry for table in _OF_KIND.values() for name, entry in table.items()
    }
    in_an_expert: ClassVar[Mapping[str, Entry]] = {
        "linear_fc1": ("rows", ("mixer.experts.{}.up_proj.weight",)),
        "linear_fc2": ("columns", ("mixer.experts.{}.down_proj.weight",)),
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        config = {**config, **{old: config[name] for name, old in _NAMES.items() if name in config}}
        kinds = _kinds(path, config)
        need(path, config, *_SIZES)
        heads, head, groups, state, kernel = (config[size] for size in _SIZES)
        if heads % groups:
            raise UnsupportedModelError(f"{path}: mamba_num_heads={heads}; allowed: a multiple of n_groups={groups}")
        given = {name: value for name, value in config.items() if name not in _LISTS}
        given |= {"num_hidden_layers": len(kinds), "hybrid_override_pattern": kinds}
        given |= {"head_dim": config.get("attention_head_dim"), "rms_norm_eps": config.get("layer_norm_epsilon", _EPS)}
        mamba = MambaShape(kinds=kinds, heads=heads, head=head, groups=groups, state=state, kernel=kernel)
        return replace(super().read(path, given), mamba=mamba, gated=False)

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        kinds = config["hybrid_override_pattern"]
        if EXPERTS not in kinds:
            return None
        need(path, config, "moe_shared_expert_intermediate_size")
        moe = super().read_experts(path, {"n_shared_experts": 1, **config, "first_k_dense_replace": 0})
        assert moe is not None
        dense = tuple(layer for layer, kind in enumerate(kinds) if kind != EXPERTS)
        return replace(moe, dense_layers=dense, shared_ffn=config["moe_shared_expert_intermediate_size"])

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        super().refuse(path, config)
        need_values(path, config, _BUILT)
        limit = config.get("time_step_limit")
        if limit not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
            raise UnsupportedModelError(f"{path}: time_step_limit={limit} is not supported; allowed: [0.0, Infinity]")

    @classmethod
    def has_in_layer(cls, shape: ModelShape, layer: int, name: str, mixture: bool) -> bool:
        return name in _OF_KIND[_mamba(shape).kinds[layer]]

    @classmethod
    def edit_in_layer(cls, layer: ModuleSpec, config: TransformerConfig, shape: ModelShape, number: int) -> None:
        from streamrl.learner.mamba import keep_one_part

        keep_one_part(layer, _mamba(shape), number)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        from streamrl.learner.mapping import by_group

        def groups(shape: ModelShape) -> int:
            return _mamba(shape).groups

        return {
            "mamba_in": by_group(lambda shape: _mamba(shape).parts, groups),
            "mamba_mixed": by_group(lambda shape: _mamba(shape).mixed, groups),
        }

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        mamba = _mamba(shape)
        return {
            "hybrid_override_pattern": mamba.kinds,
            "is_hybrid_model": True,
            "mamba_num_heads": mamba.heads,
            "mamba_head_dim": mamba.head,
            "mamba_num_groups": mamba.groups,
            "mamba_state_dim": mamba.state,
            "position_embedding_type": "none",
            "swiglu": False,
            "squared_relu": True,
        }

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        from streamrl.learner.mamba import squared_relu

        return {
            "activation_func": squared_relu,
            "no_rope_freq": [1] * shape.layers,
            "linear_attention_freq": [int(shape.is_mamba(layer)) for layer in range(shape.layers)],
        }


def _kinds(path: Path, config: dict[str, Any]) -> str:
    """A letter for each layer."""
    key = next((name for name in _LISTS if config.get(name)), "hybrid_override_pattern")
    given = config.get(key)
    if not given:
        raise UnsupportedModelError(f"{path}: {key} is missing; allowed: a letter of {KINDS} for each layer")
    kinds = given if isinstance(given, str) else "".join(_LETTERS.get(str(kind), "?") for kind in given)
    allowed = f"{', '.join(_LETTERS)}, or letters of {KINDS}, with Mamba-2 and attention among them"
    if not {MAMBA, ATTENTION} <= set(kinds) <= set(KINDS):
        raise UnsupportedModelError(f"{path}: {key}={given} is not supported; allowed: {allowed}")
    layers = config.get("num_hidden_layers", len(kinds))
    if layers != len(kinds):
        raise UnsupportedModelError(f"{path}: num_hidden_layers={layers}; allowed: {len(kinds)}, as {key} has")
    return kinds


def _mamba(shape: ModelShape) -> MambaShape:
    assert shape.mamba is not None
    return shape.mamba
