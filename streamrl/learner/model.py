"""A Megatron-Core GPTModel from a Hugging Face folder: Qwen2, Qwen2.5, Qwen3 and Llama shapes.

One factory decides which layers it is made of, and can say so: Transformer Engine's or the local ones.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from streamrl.config_file import ConfigError
from streamrl.device import Device
from streamrl.learner.attention import PackedAttention, RMSNorm
from streamrl.learner.logprobs import Targets, token_logprobs

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")

VOCABULARY_MULTIPLE = 64
"""The embedding is padded to a multiple of this many rows for each tensor-parallel rank: what GPU kernels like.
The pads are on no machine part of a softmax."""


class UnsupportedModelError(ConfigError):
    """The folder holds a model that streamrl does not build; the text names what and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What `config.json` says of a model, under one set of names.

    Example: Qwen2.5-0.5B is `ModelShape(architecture="Qwen2ForCausalLM", layers=24, hidden=896, heads=14,
    groups=2, head_dim=64, ffn=4864, vocabulary=151936, tied=True, qkv_bias=True, qk_norm=False, ...)`.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    groups: int  # of query heads, each with one key and value head
    head_dim: int
    ffn: int
    vocabulary: int  # rows of the embedding in the folder, without padding
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_length: int  # tokens

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding in Megatron."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return math.ceil(self.vocabulary / multiple) * multiple


def read_shape(folder: Path) -> ModelShape:
    """Read `folder/config.json`. Raises UnsupportedModelError, naming the key, for what is not built here."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"model.path: {folder} has no config.json; a Hugging Face folder is needed")
    config: dict[str, Any] = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {architecture} is not supported; allowed: {', '.join(ARCHITECTURES)}"
        )
    _refuse(path, config)
    heads = config["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim")
        or (128 if architecture == "Qwen3ForCausalLM" else config["hidden_size"] // heads),
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(path, config),
        max_length=config.get("max_position_embeddings", 32768),
    )


def _refuse(path: Path, config: dict[str, Any]) -> None:
    """Refuse what would silently be computed otherwise than Hugging Face does."""
    allowed = {
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "use_sliding_window": (False, config.get("use_sliding_window", False)),
        "quantization_config": (None, config.get("quantization_config")),
    }
    for key, (value, given) in allowed.items():
        if given != value:
            raise UnsupportedModelError(f"{path}: {key}={given!r} is not supported; allowed: {value!r}")
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"{path}: layer_types has {sorted(kinds)}; allowed: full_attention alone")


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    """Theta, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise UnsupportedModelError(f"{path}: RoPE scaling {kind!r} is not supported; allowed: 'default'")
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which layers the model is made of, and why: for the log and `streamrl doctor`."""

    kind: Literal["transformer_engine", "local"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} layers: {self.reason}"


def choose_layers(device: Device, dtype: torch.dtype) -> LayerChoice:
    """Transformer Engine where it can run packed sequences of this dtype, else the local layers."""
    if device.kind == "cpu":
        return LayerChoice("local", "no CUDA on this machine; attention by padded blocks through torch SDPA")
    if importlib.util.find_spec("transformer_engine") is None:
        return LayerChoice("local", "Transformer Engine is not installed; attention by torch's varlen kernel or SDPA")
    if dtype != torch.bfloat16:
        return LayerChoice("local", f"Transformer Engine has no packed attention for {dtype}; attention by torch SDPA")
    return LayerChoice("transformer_engine", "CUDA, Transformer Engine and bfloat16")


class PolicyModel(GPTModel):
    """GPTModel that can give the log-probs of chosen tokens instead of the logits of all.

    With `labels=Targets(...)` the output layer runs on the hidden states that predict those tokens alone.
    """

    shape: ModelShape

    def _preprocess(
        self, *, position_ids: Tensor, packed_seq_params: PackedSeqParams | None = None, **rest: Any
    ) -> Any:
        """Megatron's, with the RoPE angles of a packed row by `position_ids`, [1, T], instead of by place.

        Megatron counts positions from 0 in each sequence; an answer behind a shared prompt begins later.
        """
        embedded, angles, *others = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **rest
        )
        if packed_seq_params is not None:
            angles = angles.index_select(0, position_ids.squeeze(0))  # [T, 1, 1, d]
        return embedded, angles, *others

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets | None = None, **rest: Any) -> Any:
        """(log-probs [N], entropies [N]) with targets; logits [b, s, vocabulary] (padded) without."""
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=None, **rest)
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        chosen = hidden_states.squeeze(1).index_select(0, labels.positions)
        return token_logprobs(chosen, weight, labels, self.shape.vocabulary, self.pg_collection.tp)


def build(shape: ModelShape, dtype: torch.dtype, device: Device) -> PolicyModel:
    """The model of this rank, its parameters allocated and not yet set. Parallel state must be initialised."""
    config = _transformer_config(shape, dtype, device)
    choice = choose_layers(device, dtype)
    spec = _engine_spec(config) if choice.kind == "transformer_engine" else _local_spec(config)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    model = PolicyModel(
        config,
        spec,
        vocab_size=shape.padded_vocabulary(tensor_parallel),
        max_sequence_length=shape.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    model.shape = shape
    return model.to(device.torch_device)


def _transformer_config(shape: ModelShape, dtype: torch.dtype, device: Device) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # The loss comes divided by the counts of the whole step: Megatron must sum it over micro batches
        # and data-parallel ranks, not average it.
        calculate_per_token_loss=True,
        # Every parameter is loaded right after, so that drawing random values would be thrown away.
        perform_initialization=False,
        use_cpu_initialization=device.kind == "cpu",
        # These fusions need kernels of Transformer Engine or Apex.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _engine_spec(config: TransformerConfig) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)


def _local_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with the core attention and the norm of `attention.py`, in every place."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, pp_rank=parallel_state.get_pipeline_model_parallel_rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
