"""What is the same of every model that transformers builds: how its `config.json` is read, and what it cannot do here.

transformers is asked when a model is read, not when this is imported: it brings torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config import Config
from streamrl.config.learner import LORA_PROJECTIONS, LayoutConfig
from streamrl.config.refused import Refusals
from streamrl.config.words import as_text
from streamrl.learner import megatron_fields
from streamrl.learner.families.base import ModelFamily
from streamrl.learner.rope import DEFAULT_THETA, LONGROPE, Rope
from streamrl.learner.shape import AttentionShape, Counts, ModelShape, UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

IMPLEMENTATION = "model.implementation: transformers"

# Of `config.json`: what says nothing of what is computed.
_OF_THE_FOLDER = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)

# Where a configuration has neither them nor a name of its own for them.
_LONGEST = 32768

# Settings of the learner that are about layers of Megatron-Core's, and what they are to be.
_OF_MEGATRON: tuple[tuple[str, Any], ...] = (
    ("router_replay", False),
    ("moe_permute_fusion", False),
    ("tp_comm_overlap", False),
    ("gradient_accumulation_fusion", False),
    ("freeze_vision", False),
)


class Transformers(ModelFamily):
    """A causal language model of transformers' `AutoModelForCausalLM`, without code from its folder."""

    architectures = ()
    engine = False
    by_megatron = False
    served_adapters = False
    served_blocks = False
    without_adapters = frozenset(LORA_PROJECTIONS)

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        described = _described(path, config)
        heads = _first(described, "num_attention_heads", "n_head") or 0
        hidden = _first(described, "hidden_size", "n_embd", "d_model")
        if hidden is None or described.vocab_size < 1:
            raise UnsupportedModelError(f"{path}: hidden_size or vocab_size is missing; allowed: numbers above 0")
        window = _first(described, "sliding_window")
        layers = described.num_hidden_layers
        return ModelShape(
            architecture=config["architectures"][0],
            family=cls,
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=_first(described, "num_key_value_heads") or max(1, heads),
            head_dim=_first(described, "head_dim") or hidden // max(1, heads),
            ffn=_first(described, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
            vocabulary=described.vocab_size,
            tied=bool(_first(described, "tie_word_embeddings")),
            qkv_bias=False,
            qk_norm=False,
            norm_eps=0.0,  # this and the rotary embedding are read by transformers' class
            rope=Rope(theta=DEFAULT_THETA),
            max_length=_longest(described),
            attention=AttentionShape(window=window, windowed=tuple(range(layers)) if window else ()),
            computes={key: value for key, value in config.items() if key not in _OF_THE_FOLDER},
        )

    @classmethod
    def check_layout(cls, shape: ModelShape, layout: LayoutConfig) -> None:
        refusals = Refusals()
        for key in ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor"):
            if (size := getattr(layout, key)) > 1:
                refusals.add(
                    f"learner.layout.{key}: {size} would cut {shape.architecture}, and {IMPLEMENTATION} has it whole "
                    "on every rank; allowed: 1, more learner.ranks are data parallel"
                )
        refusals.tell()

    @classmethod
    def check_run(cls, config: Config) -> None:
        refusals, learner = Refusals(), config.learner
        for key, allowed in _OF_MEGATRON:
            if (given := getattr(learner, key)) != allowed:
                refusals.add(_refusal(f"learner.{key}", given, allowed))
        if learner.lora.rank:
            refusals.add(_refusal("learner.lora.rank", learner.lora.rank, 0))
        if learner.recompute == "selective":
            refusals.add(f"learner.recompute: selective is not possible with {IMPLEMENTATION}; allowed: none, full")
        known = megatron_fields.installed() if learner.megatron else {}
        for name in learner.megatron:
            if list(known.get(name, ())) == ["TransformerConfig"]:
                refusals.add(
                    f"{megatron_fields.KEY}.{name}: Megatron-Core builds no layers with {IMPLEMENTATION}; allowed: "
                    "fields of OptimizerConfig and DistributedDataParallelConfig"
                )
        if config.model.family is not None:
            refusals.add(_refusal("model.family", config.model.family, None))
        if config.algo.distillation.family is not None:
            refusals.add(_refusal("algo.distillation.family", config.algo.distillation.family, None))
        for pool in config.generate.each_pool:
            if pool.quantization is not None:
                refusals.add(_refusal("generate.quantization", pool.quantization, None))
        refusals.tell()

    @classmethod
    def counts(cls, shape: ModelShape) -> Counts:
        return _counts(json.dumps(shape.computes, sort_keys=True))


def read_config(computes: Mapping[str, Any]) -> Any:
    """transformers' configuration of what `config.json` says."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**computes)


def skeleton(computes: Mapping[str, Any], **fields: Any) -> nn.Module:
    """transformers' model of a configuration, with random weights. fields: as `from_config` takes them."""
    from transformers import AutoModelForCausalLM

    described = read_config(computes)
    described.use_cache, described.return_dict = False, True
    model: nn.Module = AutoModelForCausalLM.from_config(described, trust_remote_code=False, **fields)
    return model


def _refusal(key: str, given: Any, allowed: Any) -> str:
    return f"{key}: {as_text(given)} is not possible with {IMPLEMENTATION}; allowed: {as_text(allowed)}"


def _described(path: Path, config: dict[str, Any]) -> Any:
    """transformers' configuration. Raises UnsupportedModelError for what is no causal language model of it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    architecture, kind = (config.get("architectures") or ["none"])[0], config.get("model_type")
    for key in ("vision_config", "audio_config", "text_config", "quantization_config"):
        if config.get(key) is not None:
            raise UnsupportedModelError(f"{path}: {key} is not supported with {IMPLEMENTATION}; allowed: null")
    built = NAMES.get(str(kind))
    if built != architecture:
        offered = f"builds {built} of model_type {kind}" if built else f"has no model_type {kind}"
        raise UnsupportedModelError(
            f"{path}: architecture {architecture} is not supported, transformers {transformers.__version__} {offered}; "
            "allowed: a causal language model of transformers (code from a model folder is never run)"
        )
    try:
        described = read_config(config)
    except Exception as error:  # whatever a configuration's checks raise
        said = " ".join(str(error).split())
        raise UnsupportedModelError(f"{path}: transformers refuses it: {said}; allowed: what it reads") from error
    if described.is_encoder_decoder:
        raise UnsupportedModelError(f"{path}: {architecture} has an encoder; allowed: a causal language model")
    return described


def _longest(described: Any) -> int:
    """Tokens that a sequence may have: with LongRoPE up to where its frequencies change."""
    longest = _first(described, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    ropes = _first(described, "rope_parameters") or {}
    for rope in _each_rope(ropes):
        if rope.get("rope_type") == LONGROPE:
            original = rope.get("original_max_position_embeddings") or _first(
                described, "original_max_position_embeddings"
            )
            longest = original or longest
    return longest or _LONGEST


def _each_rope(ropes: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One for all layers, or one for each kind of layers."""
    nested = [each for each in ropes.values() if isinstance(each, Mapping)]
    yield from nested or [ropes]


def _first(described: Any, *names: str) -> Any:
    """What the configuration has under the first of these names that it has."""
    return next((found for name in names if (found := getattr(described, name, None)) is not None), None)


@functools.cache
def _counts(computes: str) -> Counts:
    """Counted from the model's tensors, none of which gets memory."""
    import torch

    with torch.device("meta"):
        model = skeleton(json.loads(computes))
    described: Any = model.config
    experts = _first(described, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 1
    top_k = _first(described, "num_experts_per_tok", "moe_top_k", "moe_k", "top_k") or experts
    tables = {id(table.weight) for table in _tables(model)}
    met = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables and parameter.dim() > 1:
            met += parameter.numel() * min(top_k, experts) // experts if ".experts." in name else parameter.numel()
    return Counts(parameters=sum(parameter.numel() for parameter in model.parameters()), met=met)


def _tables(model: Any) -> Iterator[Any]:
    """Embedding and output layer."""
    yield from (each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None)
