"""What each rank of `streamrl convert` does: weights from one form into the other, through a model that is cut.

    Hugging Face folder ──load_weights──▶ model ──dist_checkpointing──▶ release/: shards, common.pt
    Megatron checkpoint ──dist_checkpointing──▶ model ──export_weights──▶ Hugging Face folder
    its older format ──────torch_format.py────▶ model

Nothing is computed, so that the model lies in host memory, once over all ranks, whatever accelerators there are.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.transformer.moe.moe_layer import MoELayer

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner import torch_format
from streamrl.learner.checkpoint import DESCRIPTION as DESCRIBED
from streamrl.learner.checkpoint import read, verify
from streamrl.learner.huggingface import copy_description, export_folder, load_weights
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import VOCABULARY_MULTIPLE, ModelShape, WeightsMismatchError, read_shape
from streamrl.lifeline import end_with
from streamrl.observe.bars import paced, silent
from streamrl.types import PolicyVersion
from streamrl.whole_files import sync

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what Megatron-LM calls a checkpoint of weights alone
DESCRIPTION = "huggingface"  # beside it: all of the Hugging Face folder that is no weight

CHECKPOINT_VERSION = 3.0  # since when Megatron-LM keeps query, key and value of a group together

# First words of the names of weights in a checkpoint; all else is the optimizer's, the schedule's, the generators'.
MODEL = ("embedding", "decoder", "output_layer", "mtp", "vision", "inner")

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # a row for each token, and pads

GRACE = 10.0  # seconds between the end of the command and that of its ranks

# How a line begins that says how many bytes of how many the first rank has read, and seconds between two of them.
READ = "bytes read:"
READ_EVERY = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank, started by torchrun, or alone. Returns the exit code: 0, or 2 with one line on what is refused."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.learner.conversion")
    parser.add_argument("config", type=Path, help="JSON of the configuration: model, layout, adapters")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--checkpoint", type=Path, help="Megatron checkpoint to read; without: model.path is read")
    parser.add_argument("--lifeline", type=int, required=True, metavar="PID", help="end when this process ends")
    options = parser.parse_args(arguments)
    end_with({options.lifeline, os.getppid()}, grace=GRACE)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    config = Config.model_validate_json(options.config.read_text())
    try:
        ranks = Ranks.start(config)
        if options.checkpoint is None:
            to_megatron(config, ranks, options.target)
        else:
            to_huggingface(config, ranks, options.checkpoint, options.target)
    except ConfigError as error:
        for line in error.lines:
            print(f"streamrl: {line}", file=sys.stderr, flush=True)
        return 2
    ranks.stop()
    return 0


def to_megatron(config: Config, ranks: Ranks, target: Path) -> None:
    """Write the Hugging Face folder `model.path` as Megatron-LM writes a model alone. All ranks call.

    Raises WeightsMismatchError for tensors that are not the model's.
    """
    model = _model(config, ranks)
    load_weights([model], config.model.path, report=paced(_tell_read if ranks.rank == 0 else silent, READ_EVERY))
    if ranks.rank == 0:
        (target / RELEASE).mkdir(parents=True)
        copy_description(config.model.path, target / DESCRIPTION)
    ranks.barrier()
    moe = model.shape.moe
    content = {"non_homogeneous_layers": moe is not None and bool(moe.dense_layers), "singleton_local_shards": False}
    weights = _sharded(model, content)
    for old, new in _engine_names(model, weights).items():
        weights[old].key = new
    state = {
        "args": megatron_arguments(model.shape, config),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "model": weights,
    }
    # Megatron's own queue is a server process, which would outlive a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(target / RELEASE), strategy, content_metadata=content)
    if ranks.rank == 0:
        (target / TRACKER).write_text(RELEASE)
        _sync(target)
    ranks.barrier()


def _tell_read(done: float, total: float) -> None:
    """To the command, which reads the log of its ranks."""
    print(READ, done, total, flush=True)


def to_huggingface(config: Config, ranks: Ranks, checkpoint: Path, target: Path) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, the rest copied from `model.path`. All ranks call.

    checkpoint: the folder with `metadata.json`, written in any layout, or with `mp_rank_*`, written in the layout here.
    Layers with adapters give merged weights.
    Raises WeightsMismatchError where its weights are not those of the model, ConfigError for a run's checkpoint that is
    damaged.
    """
    version = _verified(checkpoint, ranks) if (checkpoint / DESCRIBED).is_file() else None
    model = _model(config, ranks)
    load = _load_rank_files if torch_format.is_torch_format(checkpoint) else _load_shards
    load(model, checkpoint)
    export_folder([model], config.model.path, target, version)
    ranks.barrier()


def _verified(checkpoint: Path, ranks: Ranks) -> PolicyVersion:
    """The version of a run's checkpoint, each file of which is what was written."""
    found = read(checkpoint)
    verify(found, ranks)
    return found.version


def _load_shards(model: PolicyModel, checkpoint: Path) -> None:
    """From the format torch_dist."""
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    content = dist_checkpointing.load_content_metadata(str(checkpoint)) or {}
    layer_by_layer = any(key.startswith("decoder.layers.0.") for key in stored)
    wanted = _sharded(model, {**content, "non_homogeneous_layers": layer_by_layer})
    # Transformer Engine's scales are left out: the layers here have none.
    wanted = {name: value for name, value in wanted.items() if not isinstance(value, ShardedObject)}
    for old, new in _engine_names(model, wanted).items():
        wanted[old].key = new if new in stored else wanted[old].key
    _refuse_others(model, wanted, stored, checkpoint)
    loaded = dist_checkpointing.load({"model": wanted}, str(checkpoint))
    model.load_state_dict(loaded["model"], strict=False)  # but for those scales it is complete


def _load_rank_files(model: PolicyModel, checkpoint: Path) -> None:
    """From the format torch, in the layout in which it was written."""
    position = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    needed = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    weights = torch_format.read_weights(checkpoint, position, needed, model.shape.vocabulary)
    model.load_state_dict(weights, strict=False)  # but for the scales of FP8 it is complete


def megatron_arguments(shape: ModelShape, config: Config) -> Namespace:
    """What Megatron-LM's arguments would be for this model in this layout: `args` of common.pt.

    `--use-checkpoint-args` takes the model's from there. The scalings of the rotary embedding that Megatron-LM has no
    argument for are in config.json alone.
    """
    layout, moe, scaling = config.learner.layout, shape.moe, shape.rope.scaling
    experts: dict[str, Any] = {"num_experts": None}
    if moe is not None:
        dense = set(moe.dense_layers)
        experts = {
            "num_experts": moe.experts,
            "moe_ffn_hidden_size": moe.ffn,
            "moe_layer_freq": [int(layer not in dense) for layer in range(shape.layers)] if dense else 1,
            "moe_router_topk": moe.top_k,
            "moe_router_pre_softmax": moe.sigmoid or not moe.normalised,
            "moe_router_score_function": "sigmoid" if moe.sigmoid else "softmax",
            "moe_router_enable_expert_bias": moe.sigmoid,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": moe.scaling if moe.sigmoid else None,
            "moe_router_dtype": "fp32" if moe.sigmoid else None,
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    arguments = Namespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        group_query_attention=shape.groups != shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        seq_length=shape.max_length,
        max_position_embeddings=shape.max_length,
        add_position_embedding=True,
        position_embedding_type="rope",
        use_rotary_position_embeddings=False,
        rotary_base=int(shape.rope_theta),
        rotary_percent=shape.rope.part,
        rotary_interleaved=shape.rope.interleaved,
        use_rope_scaling=scaling is not None and scaling.kind == "llama3",
        rope_scaling_factor=scaling.factor if scaling is not None else 1.0,
        normalization="RMSNorm",
        norm_epsilon=shape.norm_eps,
        apply_layernorm_1p=False,
        swiglu=True,
        squared_relu=False,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=not shape.tied,
        tokenizer_type="HuggingFaceTokenizer",
        vocab_size=shape.vocabulary,
        make_vocab_size_divisible_by=VOCABULARY_MULTIPLE,
        padded_vocab_size=shape.padded_vocabulary(layout.tensor),
        **experts,
        params_dtype=getattr(torch, config.model.dtype),
        bf16=config.model.dtype == "bfloat16",
        fp16=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=layout.expert,
        world_size=config.learner.ranks,
        data_parallel_size=config.learner.ranks // layout.model_ranks,
        data_parallel_random_init=False,
        phase_transition_iterations=None,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        no_save_optim=True,
        no_save_rng=True,
    )
    vars(arguments).update(shape.family.arguments(shape))
    return arguments


def _model(config: Config, ranks: Ranks) -> PolicyModel:
    """This rank's part of the model, without weights yet."""
    (model,) = build(read_shape(config.model.path, family=config.model.built_by), config, ranks.device)
    if model.shape.family.by_megatron:
        # A list has Megatron name the layers one by one, whatever the metadata says.
        model.decoder.config.moe_layer_freq = 1
    return model


def _sharded(model: PolicyModel, content: dict[str, Any]) -> dict[str, Any]:
    """The model's weights described shard by shard; `content` says by which rules they are named."""
    data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dict(model.sharded_state_dict(metadata={**content, "dp_cp_group": data_parallel}))


def _engine_names(model: PolicyModel, sharded: dict[str, Any]) -> dict[str, str]:
    """Name in `sharded` -> key in a checkpoint by Transformer Engine, where the local layers' key is another one.

    Before an MLP the norm is part of it; before experts it is a layer of its own, which the local layers do not know.
    """
    if not model.shape.family.by_megatron:
        return {}
    names = [f"decoder.layers.{index}.pre_mlp_layernorm.weight" for index in range(len(model.decoder.layers))]
    alone = [name for name, layer in zip(names, model.decoder.layers, strict=True) if isinstance(layer.mlp, MoELayer)]
    return {name: sharded[name].key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.") for name in alone}


def _refuse_others(model: PolicyModel, wanted: dict[str, Any], stored: dict[str, Any], checkpoint: Path) -> None:
    """Raise WeightsMismatchError, on all ranks alike, unless the checkpoint's weights are those of the model.

    wanted: this rank's weights, by shards; stored: the checkpoint's, whole.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(_whole_shapes(wanted)))
    needed = {key: shape for own in everyone for key, shape in own.items()}
    if missing := needed.keys() - stored.keys():
        raise WeightsMismatchError(f"{checkpoint}: tensor {min(missing)} is missing")
    if unused := {key for key in stored if key.partition(".")[0] in MODEL} - needed.keys():
        raise WeightsMismatchError(f"{checkpoint}: {min(unused)} and {len(unused) - 1} more have no place in the model")
    for key, shape in sorted(needed.items()):
        given, own = list(stored[key].global_shape), list(shape)
        if key in VOCABULARY:  # padded by the layout that wrote it
            given[0], own[0] = min(given[0], model.shape.vocabulary), model.shape.vocabulary
        if given != own:
            raise WeightsMismatchError(f"{checkpoint}: tensor {key} is {given}, the model needs {own}")


def _whole_shapes(wanted: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Key and whole shape of each weight in a checkpoint."""
    for value in wanted.values():
        parts = value.build() if isinstance(value, ShardedTensorFactory) else value
        for part in nested_values([parts]):
            yield part.key, part.global_shape


def _sync(folder: Path) -> None:
    """Wait until a folder with all that is in it is on disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


if __name__ == "__main__":
    raise SystemExit(main())
