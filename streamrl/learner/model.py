"""A Megatron-Core GPTModel from a Hugging Face folder: Qwen2, Qwen2.5, Qwen3 and Llama shapes.

One factory decides which layers it is made of, and can say so: Transformer Engine's or the local ones.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
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

from streamrl.device import Device
from streamrl.learner.attention import PackedAttention, RMSNorm
from streamrl.learner.logprobs import Targets, token_logprobs
from streamrl.learner.shape import ModelShape


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
