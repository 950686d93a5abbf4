"""Megatron-Core's fields that streamrl sets itself, and what sets each: a key, the model, or nothing else. Pure.

`learner.megatron` takes the others. What is set here and may be set otherwise, too, is in `DEFAULTS`.
"""

from __future__ import annotations

# By a key of the configuration.
KEYS: dict[str, str] = {
    "tensor_model_parallel_size": "learner.layout.tensor",
    "sequence_parallel": "learner.layout.sequence",
    "pipeline_model_parallel_size": "learner.layout.pipeline",
    "virtual_pipeline_model_parallel_size": "learner.layout.virtual",
    "num_layers_in_first_pipeline_stage": "learner.layout.first_stage",
    "num_layers_in_last_pipeline_stage": "learner.layout.last_stage",
    "context_parallel_size": "learner.layout.context",
    "expert_model_parallel_size": "learner.layout.expert",
    "expert_tensor_parallel_size": "learner.layout.expert_tensor",
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "model.dtype"),
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"), "learner.recompute"
    ),
    "gradient_accumulation_fusion": "learner.gradient_accumulation_fusion",
    "moe_permute_fusion": "learner.moe_permute_fusion",
    "tp_comm_overlap": "learner.tp_comm_overlap",
    "moe_enable_routing_replay": "learner.router_replay",
    "overlap_grad_reduce": "learner.overlap",
    "lr": "learner.optimizer.lr",
    "min_lr": "learner.optimizer.min_lr",
    "weight_decay": "learner.optimizer.weight_decay",
    "adam_beta1": "learner.optimizer.beta1",
    "adam_beta2": "learner.optimizer.beta2",
    "adam_eps": "learner.optimizer.eps",
    "clip_grad": "learner.optimizer.clip_grad",
    "use_distributed_optimizer": "learner.optimizer.distributed",
    **dict.fromkeys(
        (
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
        ),
        "learner.optimizer.offload",
    ),
    "log_num_zeros_in_grad": "learner.params_metrics",
    "check_for_nan_in_grad": "learner.bad_steps",
    "check_for_large_grads": "learner.optimizer.spike_factor",
}

# By the model's config.json: another value would be another model than the servers have.
MODEL = frozenset(
    [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "softmax_scale",
        "softmax_type",
        "ffn_hidden_size",
        "normalization",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "apply_residual_connection_post_layernorm",
        "gated_linear_unit",
        "glu_linear_offset",
        "activation_func",
        "activation_func_clamp_value",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "qk_l2_norm",
        "attention_output_gate",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "rotary_interleaved",
        "no_rope_freq",
        "mrope_section",
        "window_size",
        "window_attn_skip_freq",
        "multi_latent_attention",
        "experimental_attention_variant",
        "mtp_num_layers",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_latent_size",
        "moe_apply_probs_on_input",
        "is_hybrid_model",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "heterogeneous_block_specs",
    ]
)

# By streamrl alone: the loss, the packing, the export or the checkpoints of another value would be wrong.
FIXED = frozenset(
    [
        "calculate_per_token_loss",
        "perform_initialization",
        "use_cpu_initialization",
        "init_model_with_meta_device",
        "hidden_dropout",
        "attention_dropout",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "variable_seq_lengths",
        "pipeline_model_parallel_layout",
        "hybrid_context_parallel",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
        "moe_router_load_balancing_type",
        "moe_router_bias_update_rate",
        "moe_aux_loss_coeff",
        "moe_router_force_load_balancing",
        "transformer_impl",
        "use_inference_optimized_layers",
        "flash_decode",
        "fp4",
        "fp8_param",
        "fp4_param",
        "fp8_param_gather",
        "optimizer",
        "average_in_collective",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "num_distributed_optimizer_instances",
    ]
)

# What streamrl sets, and `learner.megatron` may set otherwise: how it is computed, not what.
DEFAULTS = frozenset(
    [
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "grad_reduce_in_fp32",
    ]
)


def owner(name: str) -> str | None:
    """What sets a field, the end of a line that refuses it; None where `learner.megatron` may."""
    if (key := KEYS.get(name)) is not None:
        return f"{key} sets it; allowed: that key"
    if name in MODEL:
        return "the model's config.json sets it; allowed: another model.path"
    return "streamrl sets it, and relies on it; allowed: no value" if name in FIXED else None
