"""Megatron-Core GPTModels of a Hugging Face shape: the model chunks that one rank holds in its layout.

One factory decides which layers they are made of, and can say so: Transformer Engine's or the local ones.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from streamrl.config import Config
from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.config.learner import LearnerConfig
from streamrl.device import Device
from streamrl.learner import lora, megatron_fields, router_replay, sigmoid_router
from streamrl.learner.attention import PackedAttention, PackedSegments
from streamrl.learner.full_kl import ReferenceStates, full_kl
from streamrl.learner.host_memory import host_copy
from streamrl.learner.layout_fit import check_fit
from streamrl.learner.logprobs import Targets, over_context, token_logprobs
from streamrl.learner.norm import RMSNorm
from streamrl.learner.shape import ModelShape, check_adapters
from streamrl.learner.te import start_overlap, te_problem
from streamrl.learner.vision import tower
from streamrl.learner.vision.positions import angles as multimodal_angles

log = logging.getLogger(__name__)

GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"  # the module that Megatron imports for it


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which layers the model is made of, and why: for the log and `streamrl doctor`."""

    kind: Literal["transformer_engine", "local"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} layers: {self.reason}"


def choose_layers(device: Device, dtype: torch.dtype) -> LayerChoice:
    """Transformer Engine where it can run the dtype, else the local layers."""
    if device.kind == "cpu":
        return LayerChoice("local", "no CUDA on this machine; attention by padded blocks through torch SDPA")
    if problem := te_problem():
        return LayerChoice("local", f"Transformer Engine {problem}; attention by torch's varlen kernel or SDPA")
    if dtype != torch.bfloat16:
        return LayerChoice("local", f"Transformer Engine has no packed attention for {dtype}; attention by torch SDPA")
    return LayerChoice("transformer_engine", "CUDA, Transformer Engine and bfloat16")


class PolicyModel(GPTModel):
    """GPTModel that can give the log-probs of chosen tokens instead of the logits of all.

    With `labels=Targets(...)` the output layer runs on the hidden states that predict those tokens alone.
    """

    shape: ModelShape
    layers: LayerChoice
    vision: tower.VisionTower | None  # of a model that reads images, on its first stage
    overlaps = True  # gradients may be reduced while the backward pass runs
    one_a_row = False
    values = False  # it is a critic
    states: list[ReferenceStates] | None = None  # of each micro batch that goes through, while it is a list

    @property
    def shares_prompts(self) -> bool:
        """A row may have the prompt of several answers once."""
        return self.layers.kind == "local"

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm behind all layers, on the last stage."""
        return getattr(self.decoder, "final_layernorm", None)

    def check_reference(self, algo: AlgoConfig) -> None:
        """Refuse a loss against a reference that this model cannot give. Raises ConfigError."""

    def _preprocess(
        self, *, position_ids: Tensor, packed_seq_params: PackedSeqParams | None = None, **rest: Any
    ) -> Any:
        """Megatron's, with the RoPE angles of a packed row by `position_ids`, [1, T], instead of by place, and with the
        features of its images; with images `position_ids` are [3, T].

        Megatron counts positions from 0 in each sequence; an answer behind a shared prompt begins later. Of a
        row that is cut over context-parallel ranks the angles are those of all tokens: Megatron takes its slice.
        Transformer Engine's rows are whole sequences, and its kernel takes the table of angles by place.
        """
        embedded, angles, *others = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **rest
        )
        if embedded is not None and self.shape.embedding_scale != 1:
            embedded = embedded * embedded.new_tensor(self.shape.embedding_scale)
        if isinstance(packed_seq_params, PackedSegments):
            if position_ids.size(0) == 1:
                angles = angles.index_select(0, position_ids.squeeze(0))  # [T, 1, 1, d]
            else:
                assert self.shape.vision is not None
                axes = torch.tensor(self.shape.vision.axes, device=position_ids.device)
                angles = multimodal_angles(position_ids, self.rotary_pos_emb.inv_freq.to(position_ids.device), axes)
        if self.vision is not None:
            images = getattr(packed_seq_params, "images", None)
            rank = self.pg_collection.tp.rank() if self.config.sequence_parallel else 0
            embedded = self.vision.place(embedded, images, rank)
        return embedded, angles, *others

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets | None = None, **rest: Any) -> Any:
        """With targets (log-probs [N], entropies [N]), and divergences [N] where they have a reference; without, logits
        [b, s, vocabulary] (padded)."""
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=None, **rest)
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        chosen, group = self._states_of(hidden_states, labels), self.pg_collection.tp
        if self.states is not None:
            self.states.append(ReferenceStates(host_copy(chosen.detach()), weight.detach()))
        measured: tuple[Tensor, ...] = token_logprobs(chosen, weight, labels, self.shape.vocabulary, group)
        if labels.reference is not None:
            measured = (
                *measured,
                full_kl(chosen, weight, labels.reference, labels, vocabulary=self.shape.vocabulary, group=group),
            )
        if labels.places is None:
            return measured
        stacked = torch.stack(measured)
        return over_context(stacked, labels.places, labels.total, self.pg_collection.cp).unbind()

    def _states_of(self, hidden_states: Tensor, labels: Targets) -> Tensor:
        """[n, hidden], the states that predict the targets, whole on every tensor-parallel rank."""
        if self.config.sequence_parallel:
            # The backward pass of what is made of them gives every rank the whole gradient: each takes its part of it.
            group = self.pg_collection.tp
            hidden_states = gather_from_sequence_parallel_region(hidden_states, False, group=group)
        return hidden_states.squeeze(1).index_select(0, labels.positions)


def build(
    shape: ModelShape, config: Config, device: Device, kind: type[PolicyModel] = PolicyModel
) -> list[PolicyModel]:
    """The model chunks of this rank, parameters allocated and not yet set. Parallel state must be initialised.

    With `learner.layout.sharding: full` they are in host memory that is not used: `FullySharded` puts parts elsewhere.
    One chunk for each virtual pipeline stage of this rank, in order; one alone without virtual stages. Layers
    are numbered over the whole model: `layer.layer_number`, from 1. Raises ConfigError for a layout that does
    not fit the model, and for a router replay of a model without experts.
    """
    check_fit(shape, config.learner.layout)
    if not shape.family.by_megatron:
        return [_whole(shape, config, device, kind)]
    if config.learner.lora.rank:
        check_adapters(shape, config.learner.lora.targets)
    dtype = getattr(torch, config.model.dtype)
    layers = choose_layers(device, dtype)
    if layers.kind != "local" and not shape.family.engine:
        layers = LayerChoice("local", f"{shape.architecture} has layers of its own; attention by torch SDPA")
    log.info("%s on %s", layers, device)
    _check_kernels(config.learner, layers)
    if (asked := megatron_fields.fp8(config)) is not None and layers.kind != "transformer_engine":
        raise ConfigError(f"{asked} needs Transformer Engine's layers, not {layers}; allowed: null")
    _do_without_engine()
    transformer = _transformer_config(shape, config.learner, dtype, layers, device)
    if config.learner.tp_comm_overlap:
        start_overlap(
            padded(config.learner.tokens_per_micro_batch, transformer),
            shape.hidden,
            transformer.tensor_model_parallel_size,
            device.backend,
        )
    virtual = config.learner.layout.virtual_stages
    stages: Sequence[int | None] = range(virtual) if virtual else [None]
    chunks = [_chunk(shape, config.learner, transformer, layers, stage, kind=kind) for stage in stages]
    if not config.learner.layout.fully_sharded:
        chunks = [chunk.to(device.torch_device) for chunk in chunks]
    sigmoid_router.freeze(chunks)
    return chunks


def _whole(shape: ModelShape, config: Config, device: Device, kind: type[PolicyModel]) -> PolicyModel:
    """The model of transformers' own class, which has what the learner asks of one of these."""
    from streamrl.learner.whole.build import build_whole  # it imports this module

    return cast(PolicyModel, build_whole(shape, config, device, values=kind.values))


def row_multiple(config: TransformerConfig) -> int:
    """What the length of a padded row is a multiple of: the layout divides it."""
    ranks = config.context_parallel_size
    pieces = 2 * ranks if ranks > 1 else 1
    pieces *= get_fp8_align_size(config.fp8_recipe) if config.fp8 else 1  # what its products take, on every rank
    return pieces * (config.tensor_model_parallel_size if config.sequence_parallel else 1)


def padded(tokens: int, config: TransformerConfig) -> int:
    """The length of a row of `tokens` after padding."""
    multiple = row_multiple(config)
    return math.ceil(tokens / multiple) * multiple


def _check_kernels(learner: LearnerConfig, layers: LayerChoice) -> None:
    """Refuse what needs a kernel that is not here. Raises ConfigError."""
    for key in ("moe_permute_fusion", "tp_comm_overlap"):
        if getattr(learner, key) and layers.kind != "transformer_engine":
            raise ConfigError(f"learner.{key}: true needs Transformer Engine's layers, not {layers}; allowed: false")
    if learner.gradient_accumulation_fusion and importlib.util.find_spec(GRADIENT_KERNEL) is None:
        raise ConfigError(
            f"learner.gradient_accumulation_fusion: true needs {GRADIENT_KERNEL}, which comes with Apex and is not "
            "installed here; allowed: false"
        )


def policy_of(wrapped: nn.Module) -> PolicyModel:
    """The model chunk inside what Megatron wraps around it."""
    model: PolicyModel = get_attr_wrapped_model(wrapped, "shape", return_model_obj=True)
    return model


def _chunk(
    shape: ModelShape,
    learner: LearnerConfig,
    config: TransformerConfig,
    layers: LayerChoice,
    stage: int | None,
    *,
    kind: type[PolicyModel],
) -> PolicyModel:
    """The chunk of one virtual stage of this rank; None: there is one chunk alone."""
    engine = layers.kind == "transformer_engine"
    block = _engine_block(config, stage) if engine else _local_block(config, stage)
    block.layer_specs = [copy.deepcopy(spec) for spec in block.layer_specs]  # Megatron's are one object for a kind
    first = get_transformer_layer_offset(config, stage, parallel_state.get_pipeline_model_parallel_rank())
    for number, spec in enumerate(block.layer_specs, first):
        shape.family.edit_in_layer(spec, config, shape, number)
    block.layer_specs = [lora.adapted(spec, learner.lora, engine=engine) for spec in block.layer_specs]
    model = kind(
        config,
        block,
        vocab_size=shape.padded_vocabulary(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        rotary_percent=shape.rope.part,
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
        vp_stage=stage,
    )
    model.shape, model.layers = shape, layers
    # Megatron scales by constants of its own; the configuration of the model says what to scale by.
    model.rotary_pos_emb.inv_freq = shape.frequencies().to(model.rotary_pos_emb.inv_freq.device)
    model.vision = None
    if shape.vision is not None and model.pre_process:
        tower.attach(model, frozen=learner.freeze_vision, recompute=bool(_recomputed(learner)))
    _mark_parameters(model)
    if learner.router_replay:
        router_replay.attach(model, shape)
    return model


def _mark_parameters(model: nn.Module) -> None:
    """Say of each parameter what Megatron reads when it sums gradients and measures their norm.

    A cut weight is a shard, which counts in the norm on every tensor-parallel rank, not on one; Megatron says so
    where it draws values, which does not happen here. An expert's gradient is summed over the ranks that have the
    same expert; Megatron takes them for the data-parallel ranks if `learner.layout.expert` is 1, and then misses
    the tensor-parallel ones, which have other tokens.
    """
    dimension = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    for module in model.modules():
        for kind, cut in dimension.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, kind) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, cut, getattr(module, "stride", 1))
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False
                # Biases say otherwise: they would be summed over ranks that have other experts, and be left out of the
                # norm there.
                if getattr(parameter, "sequence_parallel", False):
                    parameter.sequence_parallel = False
                parameter.tensor_model_parallel = True


def _transformer_config(
    shape: ModelShape, learner: LearnerConfig, dtype: torch.dtype, choice: LayerChoice, device: Device
) -> TransformerConfig:
    layout, engine = learner.layout, choice.kind == "transformer_engine"
    fields: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        softmax_scale=shape.softmax_scale,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        rotary_interleaved=shape.rope.interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence and layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        num_layers_in_first_pipeline_stage=layout.first_stage,
        num_layers_in_last_pipeline_stage=layout.last_stage,
        virtual_pipeline_model_parallel_size=layout.virtual_stages,
        # Between the two ranks of a short pipeline, sends of both directions must not share one batch.
        overlap_p2p_comm=layout.virtual > 1,
        batch_p2p_comm=layout.virtual == 1,
        # A way round a bug of old versions of torch; it would wait for every stream, the publisher's as well.
        batch_p2p_sync=False,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        # The loss comes divided by the counts of the whole step: Megatron must sum it over micro batches
        # and data-parallel ranks, not average it.
        calculate_per_token_loss=True,
        # Every parameter is loaded right after, so that drawing random values would be thrown away.
        perform_initialization=False,
        use_cpu_initialization=device.kind == "cpu" or layout.fully_sharded,
        # These need kernels that come with Transformer Engine, or a compiler that does where it is.
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine,
        apply_rope_fusion=engine and not shape.rope.interleaved and shape.rotary_gain == 1,
        tp_comm_overlap=learner.tp_comm_overlap,
        gradient_accumulation_fusion=learner.gradient_accumulation_fusion,
        # These need kernels of Apex, or are of no use to packed rows.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_recomputed(learner),
        **_experts(shape, learner, choice),
    )
    given = megatron_fields.values_of(learner.megatron, "TransformerConfig")
    try:
        kind = TransformerConfig if shape.latent is None else MLATransformerConfig
        config = kind(**{**fields, **shape.family.megatron(shape), **given})
    except (ValueError, AssertionError, ImportError) as error:
        raise megatron_fields.refused(given, error) if given else error from None
    if shape.rotary_gain != 1:  # Megatron reads it as yarn's, 0.1 ln(factor) + 1
        config.yarn_rotary_scaling_factor = math.exp((shape.rotary_gain - 1) / 0.1)
    return config


def _recomputed(learner: LearnerConfig) -> dict[str, Any]:
    """Which activations the backward pass computes again."""
    if learner.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if learner.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _experts(shape: ModelShape, learner: LearnerConfig, choice: LayerChoice) -> dict[str, Any]:
    """The mixture-of-experts layers, routed as Hugging Face routes: by a softmax over all experts, or by sigmoids."""
    if shape.moe is None:
        return {}
    return {
        "num_moe_experts": shape.moe.experts,
        "moe_ffn_hidden_size": shape.moe.ffn,
        "moe_layer_freq": [int(layer not in shape.moe.dense_layers) for layer in range(shape.layers)],
        "moe_router_topk": shape.moe.top_k,
        # A softmax over the chosen experts alone is the softmax over all, made to sum to 1 over the chosen.
        "moe_router_pre_softmax": not shape.moe.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": choice.kind == "transformer_engine",
        "moe_permute_fusion": learner.moe_permute_fusion,
        "moe_shared_expert_intermediate_size": shape.moe.shared_ffn or None,
        "moe_shared_expert_gate": shape.moe.shared_gate,
        **sigmoid_router.fields(shape.moe),
    }


def _do_without_engine() -> None:
    """The router of a mixture of experts asks for a name of Transformer Engine that is not imported without it."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _engine_block(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)


def _local_block(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's local layers with the core attention and the norm of `attention.py`, in every place."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
    return block
