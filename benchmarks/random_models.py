"""Tiny models with random weights and batches with random answers, for checks that need no trained model."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from launch.tiny_model import END as END_OF_TEXT
from launch.tiny_model import complete
from launch.tiny_vl_model import turn_experts
from streamrl.config.learner import LORA_PROJECTIONS
from streamrl.learner.shape import read_shape
from streamrl.publish.peft import tensor_name
from streamrl.testing.families import VOCABULARY, random_model
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

# Of models with latent attention, whose value heads have a width of their own.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}

# Of hybrid models: Mamba-2 layers whose steps are not at transformers' floor under them, and no tied embeddings.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-30,
    "time_step_floor": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}

# Of vision-language models: tokens that represent images, and a tower of two layers.
IMAGE, VIDEO, START, END = range(VOCABULARY - 11, VOCABULARY - 7)  # prompts and answers have smaller ones alone
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SEES: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}

QWEN3_VL: dict[str, Any] = {
    **SEES,
    "head_dim": 32,
    "vision_config": {
        **TOWER,
        "patch_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}

# Of delta nets: more value heads than key heads, of another width.
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

# transformers' class, and what its configuration needs.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "hidden_size": 128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.25 * pair for pair in range(12)],
                "long_factor": [4.0] * 12,
            },
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "pad_token_id": 0,
        },
    ),
    "nemotron_h": ("NemotronHForCausalLM", HYBRID),
    "nemotron_3": (
        "NemotronHForCausalLM",
        {
            **HYBRID,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 32}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 32, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": 32,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "moonlight": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            **SEES,
            "vision_config": {**TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]},
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            **SEES,
            **DELTA,
            "vision_config": {**TOWER, "patch_size": 16, "num_position_embeddings": 16},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", QWEN3_VL),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {**QWEN3_VL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
}


# Those that are made of Megatron's local layers also where Transformer Engine is.
LOCAL_FAMILIES = (
    "deepseek_v3", "moonlight", "gpt_oss", "gemma3_text", "qwen3_next", "nemotron_h", "nemotron_3",
    "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
ENGINE_FAMILIES = tuple(family for family in FAMILIES if family not in LOCAL_FAMILIES)


def write_model(folder: Path, family: str = "qwen2", tied: bool = False, layers: int = 2, **shape: Any) -> Path:
    """Save a model of this family with random weights, biases and norms, as transformers does. Returns `folder`.

    Further keyword arguments go into its configuration.
    """
    model_class, needed = FAMILIES[family]
    config = {"num_hidden_layers": layers, "tie_word_embeddings": tied, **needed, **shape}
    random_model(model_class, **config).save_pretrained(folder)
    complete(folder)
    turn_experts(folder)
    if "vision_config" in config:
        patch = config["vision_config"]["patch_size"]
        _image_processor(patch).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    """By which servers find the places of images; the other tokens are one character each."""
    others = [chr(number) for number in range(ord("!"), ord("!") + IMAGE - 1)]
    tokenizer = Qwen2Tokenizer(vocab={token: place for place, token in enumerate([END_OF_TEXT, *others])}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [IMAGE, VIDEO, START, END]
    return tokenizer


def _image_processor(patch: int) -> Any:
    """Of images of 4 to 36 tokens."""
    side = 2 * patch
    size = {"shortest_edge": 4 * side**2, "longest_edge": 36 * side**2}
    return Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size)


def load_model(folder: Path, **options: Any) -> Any:
    """What transformers makes of a folder, whatever its architecture."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, **options).eval()


def picture(seed: int, rows: int, columns: int) -> bytes:
    """A random image of so many pixels, as PNG."""
    random = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (rows, columns, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def with_images(batch: Batch, model: Path) -> Batch:
    """The batch with images in the prompts of all groups but the last; the first two differ in their pixels alone.

    Of a model that reads none it is the same batch.
    """
    vision = read_shape(model).vision
    if vision is None:
        return batch
    side = vision.merge * vision.patch
    groups = []
    for index, group in enumerate(batch.groups[:-1]):
        rows = 2 * side
        images = (picture(index, rows, rows), picture(index + 10, rows, rows + side))[: 1 if index > 1 else 2]
        places = [part for count in (4, 6)[: len(images)] for part in (START, *[IMAGE] * count, END)]
        prompt = np.concatenate([[7, 8], places, batch.groups[max(index, 1)].samples[0].prompt_ids]).astype(np.int32)
        samples = tuple(msgspec.structs.replace(sample, prompt_ids=prompt) for sample in group.samples)
        groups.append(msgspec.structs.replace(group, samples=samples, images=images))
    return msgspec.structs.replace(batch, groups=(*groups, batch.groups[-1]))


def random_adapter(model: Path, seed: int, size: float = 0.125, rank: int = 4) -> dict[str, torch.Tensor]:
    """Matrices A and B on every projection of a saved model of two layers, under PEFT's names; `size`: their std."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for projection in (name for names in LORA_PROJECTIONS.values() for name in names):
            rows, columns = weights[f"model.layers.{layer}.{projection}.weight"].shape
            tensors[tensor_name(layer, projection, "A")] = size * torch.randn(rank, columns, generator=generator)
            tensors[tensor_name(layer, projection, "B")] = size * torch.randn(rows, rank, generator=generator)
    return tensors


TEMPERATURE = 0.8  # of all batches: a learner that forgot it would be seen


def make_batch(step: int = 0, groups: int = 3, size: int = 4, longest: int = 19) -> Batch:
    """Groups of answers of 1 to `longest` tokens, with stale tokens, masked tokens and a placeholder."""
    random = np.random.default_rng(step)
    return Batch(step=step, groups=tuple(_group(random, step, index, size, longest) for index in range(groups)))


def _group(random: np.random.Generator, step: int, index: int, size: int, longest: int) -> Group:
    prompt = random.integers(0, IMAGE, random.integers(2, 9)).astype(np.int32)
    samples = [_sample(random, step, prompt, int(random.integers(1, longest + 1))) for _ in range(size)]
    if index == 0:
        samples[0] = _sample(random, step, prompt, 0, finish_reason="placeholder")
    return Group(group_id=index, task="copy", prompt_index=index, samples=tuple(samples), temperature=TEMPERATURE)


def _sample(
    random: np.random.Generator, step: int, prompt: np.ndarray, length: int, finish_reason: str = "stop"
) -> Sample:
    old = int(random.integers(0, length + 1))
    spans = [VersionSpan(PolicyVersion(max(0, step - 1)), 0, old), VersionSpan(PolicyVersion(step), old, length)]
    return Sample(
        prompt_ids=prompt,
        output_ids=random.integers(0, IMAGE, length).astype(np.int32),
        logprobs=(-4 - random.random(length)).astype(np.float32),
        loss_mask=random.random(length) < 0.9,
        spans=tuple(span for span in spans if span.end > span.start),
        reward=float(random.random()),
        finish_reason=finish_reason,
    )


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors, relative to the largest entry of each tensor of `theirs`.

    inf where a difference is not finite. Raises ValueError when they do not have the same names.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"different names: {sorted(ours.keys() ^ theirs.keys())}")
    return worst(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max().clamp(min=1e-30)) for k in theirs)


def worst(differences: Iterable[float]) -> float:
    """The largest, or inf where one is not finite: `max` alone may pass over a NaN."""
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
