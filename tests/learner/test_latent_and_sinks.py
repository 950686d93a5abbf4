"""Latent attention, sinks, windows and experts with biases: what is computed, what is refused, what stays together."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.random_models import FAMILIES, write_model
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.lab.plan.parameters import whole_model
from streamrl.learner.attention import describe_row
from streamrl.learner.layout_fit import check_fit
from streamrl.learner.shape import UnsupportedModelError, check_adapters, read_shape
from streamrl.learner.sink_attention import SinkAttention
from streamrl.publish.staging import Staging
from streamrl.testing.families import SIZES
from streamrl.types import PolicyVersion

HEADS, GROUPS, DIM, VALUE = 4, 2, 8, 6

# A prompt of 5 with answers of 4 and 7 behind it, then sequences of 6 and of 1.
SEGMENTS = np.array([[0, 5, 0, 0], [5, 4, 0, 5], [9, 7, 0, 5], [16, 6, 0, 0], [22, 1, 0, 0]])


def by_segment(query, key, value, sinks, window):
    """Each segment by itself, with explicit scores in the order of the definition."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    output = []
    for start, length, first, prefix in SEGMENTS.tolist():
        seen = [*range(first, first + prefix), *range(start, start + length)]
        scores = torch.einsum("qhd,khd->hqk", query[start : start + length], key[seen]) / DIM**0.5
        distance = prefix + torch.arange(length)[:, None] - torch.arange(prefix + length)
        scores = scores.masked_fill((distance < 0) | (distance > window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(HEADS, 1, 1).expand(-1, length, 1)], -1)
        weights = scores.softmax(-1)[..., : prefix + length]
        output.append(torch.einsum("hqk,khd->qhd", weights, value[seen]))
    return torch.cat(output).flatten(1)


@pytest.mark.parametrize(("window", "sink"), [(3, True), (3, False), (100, True)])
def test_windows_and_sinks_are_as_defined_in_values_and_gradients(window, sink):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=DIM,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        window_size=None if window == 100 else (window, 0),
        softmax_type="learnable" if sink else "vanilla",
    )
    attention = SinkAttention(config, 1, None, "self")
    torch.manual_seed(0)
    total = int(SEGMENTS[:, 1].sum())
    shapes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, VALUE))
    tensors = [torch.randn(total, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    learned = list(tensors)
    if sink:
        torch.nn.init.normal_(attention.softmax_offset)
        learned.append(attention.softmax_offset)
    packed = attention(*tensors, packed_seq_params=describe_row(SEGMENTS, torch.device("cpu")))
    expected = by_segment(*tensors, attention.softmax_offset, window)
    torch.testing.assert_close(packed, expected)
    weights = torch.randn_like(packed)
    for ours, theirs in zip(
        *(torch.autograd.grad((x * weights).sum(), learned) for x in (packed, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def config_of(family, **changes):
    architecture, needed = FAMILIES[family]
    return SIZES | needed | {"architectures": [architecture]} | changes


LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = FAMILIES["phi3"][1]["rope_parameters"]
LONG_CONTEXT = FAMILIES["phi3"][1]["original_max_position_embeddings"]

REFUSED = [
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "FP8 weights.* dequantised to bfloat16"),
    ("deepseek_v3", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 with topk_group=2 .* allowed: 4 to 5"),
    ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 1}, "=3 with topk_group=1 .* allowed: 2 to 2"),
    ("deepseek_v3", {"n_group": 3}, "n_group=3, topk_group=2 do not fit 8 experts"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2; allowed: 4"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"MXFP4 weights.*\(dequantize=True\)"),
    ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.* allowed: 2 of full_attention"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha=1\.0 is not supported"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=false is not supported"),
    ("mixtral", {"sliding_window": 64}, "sliding_window=64 is not supported; allowed: null"),
    ("mixtral", {"head_dim": 32}, "head_dim=32 is not supported; allowed: 16"),
    ("mixtral", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' is not supported"),
    (
        "gemma3_text",
        {"final_logit_softcapping": 30.0},
        r"final_logit_softcapping=30\.0 is not supported",
    ),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window=None is not allowed"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, "'linear' is not supported for Gemma 3"),
    ("qwen3_next", {"layer_types": ["linear_attention", "mamba"]}, "layer_types=.* allowed: 2 of full_attention"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads=3; allowed: a multiple of 2"),
    ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim=None is not allowed"),
    ("nemotron_h", {"layers_block_type": ["mamba", "conv", "mlp", "attention"]}, "layers_block_type=.* allowed: mamba"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp"] * 2},
        "layers_block_type=.* with Mamba-2 and attention among",
    ),
    ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern is missing; allowed: a letter of M"),
    ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers=5; allowed: 4, as layers_block_type has"),
    ("nemotron_h", {"n_groups": 3}, "mamba_num_heads=8; allowed: a multiple of n_groups=3"),
    ("nemotron_h", {"mamba_d_conv": None}, "conv_kernel=None is not allowed"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported; allowed: 'relu2'"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0\.001, 0\.1\] is not supported"),
    ("nemotron_3", {"moe_latent_size": 32}, "moe_latent_size=32 is not supported; allowed: None"),
    ("nemotron_3", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported; allowed: 1"),
    ("phi3", {"sliding_window": 64}, "sliding_window=64 is not supported; allowed: null"),
    ("phi3", {"rope_parameters": {**LONG, "short_factor": [1.0] * 3}}, "short_factor has 3 numbers; allowed: 12"),
    ("phi3", {"rope_parameters": {**LONG, "factor": 2.0}}, r"factor=2\.0 is not supported for longrope; allowed: 4\.0"),
    ("phi3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
]


@pytest.mark.parametrize(("family", "changes", "text"), REFUSED)
def test_what_would_be_computed_otherwise_is_refused_in_one_line(family, changes, text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(family)))
    read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, **changes)))
    with pytest.raises(UnsupportedModelError, match=text) as refused:
        read_shape(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


NEMOTRON_H_8B = {  # as NVIDIA wrote it, before transformers 5
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_hidden_layers": 52,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001,
}


def test_an_older_nemotron_says_the_same_with_other_keys(tmp_path):
    config = config_of("nemotron_h", **NEMOTRON_H_8B)
    for key in ("layers_block_type", "head_dim"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert [layer for layer in range(52) if shape.has_attention(layer)] == [7, 18, 29, 40]
    assert sum(map(shape.is_mamba, range(52))) == sum(map(shape.has_mlp, range(52))) == 24
    assert (shape.head_dim, shape.norm_eps, shape.moe) == (128, 1e-5, None)
    renamed = config | {"mamba_n_groups": 8, "mamba_d_conv": 4, "n_groups": 1, "conv_kernel": 2}
    (tmp_path / "config.json").write_text(json.dumps(renamed))
    assert read_shape(tmp_path) == shape


GEMMA3_1B = {  # as Google wrote it, before transformers 5
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "num_hidden_layers": 26,
}


def test_an_older_gemma_says_the_same_with_other_keys(tmp_path):
    config = config_of("gemma3_text", **GEMMA3_1B)
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert shape.tied
    assert [layer for layer in range(26) if layer not in shape.attention.windowed] == [5, 11, 17, 23]
    assert (shape.rope.theta, shape.attention.window_rope.theta, shape.attention.window) == (1e6, 1e4, 512)
    assert shape.embedding_scale == shape.hidden**0.5


def test_longrope_holds_up_to_the_context_of_the_first_training(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("phi3")))
    assert read_shape(tmp_path).max_length == LONG_CONTEXT


def test_layouts_and_adapters_that_these_models_cannot_have_are_refused_by_name(tmp_path):
    shapes = {}
    for family in ("deepseek_v3", "gpt_oss", "qwen3_next", "nemotron_h", "nemotron_3"):
        (tmp_path / "config.json").write_text(json.dumps(config_of(family)))
        shapes[family] = read_shape(tmp_path)
    with pytest.raises(ConfigError, match=r"^learner\.layout\.expert_tensor: 2 ranks would each add the biases"):
        check_fit(shapes["gpt_oss"], LayoutConfig(tensor=2, expert_tensor=2))
    with pytest.raises(ConfigError, match=r"^learner\.lora\.targets: linear_qkv is not supported for DeepseekV3"):
        check_adapters(shapes["deepseek_v3"], ("linear_qkv", "linear_proj"))
    with pytest.raises(ConfigError, match=r"^learner\.lora\.rank: adapters are not supported for Qwen3Next"):
        check_adapters(shapes["qwen3_next"], ("linear_proj",))
    with pytest.raises(ConfigError, match=r"^learner\.layout\.context: 2 ranks would each need the state"):
        check_fit(shapes["qwen3_next"], LayoutConfig(context=2))
    with pytest.raises(ConfigError, match=r"^learner\.layout\.sequence: false with delta-net layers"):
        check_fit(shapes["qwen3_next"], LayoutConfig(tensor=2, sequence=False))
    with pytest.raises(ConfigError, match=r"^learner\.lora\.rank: adapters are not supported for NemotronH"):
        check_adapters(shapes["nemotron_h"], ("linear_proj",))
    with pytest.raises(ConfigError, match=r"^learner\.layout\.context: 2 ranks would .*NemotronH.*Mamba-2 layers"):
        check_fit(shapes["nemotron_3"], LayoutConfig(context=2))
    with pytest.raises(ConfigError, match=r"^learner\.layout\.tensor: 4 does not divide 2 groups of heads of Mamba-2"):
        check_fit(dataclasses.replace(shapes["nemotron_h"], groups=4), LayoutConfig(tensor=4))
    check_fit(shapes["nemotron_h"], LayoutConfig(tensor=2, sequence=False))


def test_tensors_that_servers_join_are_in_one_bucket():
    names = ["a", "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "b"]
    tensors = [(f"model.layers.0.{name}", torch.zeros(10)) for name in names]
    staged = Staging(bucket_bytes=80).fill(PolicyVersion(1), tensors)
    sizes = [len(bucket.layout.names) for bucket in staged.buckets]
    assert sizes == [3, 1]
    assert [bucket.layout.bytes for bucket in staged.buckets] == [120, 40]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3", "moonlight", "gpt_oss", "mixtral", "gemma3_text", "phi3", "qwen3_next", "nemotron_h",
        "nemotron_3",
    ],
)  # fmt: skip
def test_a_plan_counts_the_weights_that_a_folder_has(family, tmp_path):
    from safetensors.torch import load_file

    folder = write_model(tmp_path / "model", family, layers=3)
    weights = load_file(folder / "model.safetensors")
    assert whole_model(read_shape(folder)) == sum(weight.numel() for weight in weights.values())
