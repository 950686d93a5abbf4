"""What is read of a `config.json`, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.random_models import FAMILIES
from streamrl.learner.mapping import is_unbuilt
from streamrl.learner.rope import RopeScaling
from streamrl.learner.shape import MoeShape, UnsupportedModelError, read_shape
from streamrl.testing.families import BESIDE_TEXT, SIZES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

GLM_MOE = {  # GLM-4.5-Air's
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
}


def shape_of(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_shape(tmp_path)


def test_a_shape_has_what_the_configuration_says(tmp_path):
    shape = shape_of(tmp_path)
    assert (shape.heads, shape.groups, shape.head_dim, shape.tied) == (9, 3, 64, True)
    assert (shape.qkv_bias, shape.qk_norm, shape.norm_eps, shape.moe) == (False, False, 1e-5, None)
    assert shape.padded_vocabulary(tensor_parallel=1) == 49152
    assert shape.softmax_scale == 1 / 8
    assert shape_of(tmp_path, vocab_size=131).padded_vocabulary(tensor_parallel=2) == 256


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen2ForCausalLM", (True, False, 64)),
        ("Qwen3ForCausalLM", (False, True, 128)),
        ("Qwen3MoeForCausalLM", (False, True, 64)),
        ("LlamaForCausalLM", (False, False, 64)),
        ("MistralForCausalLM", (False, False, 64)),
    ],
)
def test_what_the_configuration_leaves_out_is_what_the_model_code_of_the_family_takes(architecture, expected, tmp_path):
    shape = shape_of(tmp_path, architectures=[architecture], sliding_window=None)
    assert (shape.qkv_bias, shape.qk_norm, shape.head_dim) == expected


WITHOUT = {
    "mixtral": ("rms_norm_eps", "rope_parameters"),
    "phi3": ("rms_norm_eps",),
    "glm4": ("rms_norm_eps",),
    "glm4_moe": ("rms_norm_eps",),
    "gpt_oss": ("rms_norm_eps", "rope_parameters", "swiglu_limit"),
    "deepseek_v3": ("rms_norm_eps", "routed_scaling_factor", "rope_interleave"),
    "qwen2_5_vl": ("rms_norm_eps",),
    "qwen3_moe": ("norm_topk_prob", "rms_norm_eps", "rope_parameters", "decoder_sparse_step"),
}


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in WITHOUT.items() for key in keys])
def test_a_key_that_is_missing_means_what_it_means_to_transformers(family, key, tmp_path):
    name, given = FAMILIES[family]
    text = {name: value for name, value in {**SIZES, **given}.items() if name != key}
    beside = {name: text.pop(name) for name in BESIDE_TEXT if name in text and "vision_config" in given}
    made = getattr(transformers, name).config_class(
        **copy.deepcopy({**beside, "text_config": text} if beside else text)
    )
    whole = {**made.to_dict(), "architectures": [name]}
    without = copy.deepcopy(whole)
    del without.get("text_config", without)[key]
    shapes = []
    for config in (whole, without):
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        shapes.append(read_shape(tmp_path))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_theta_is_found_where_either_generation_of_transformers_writes_it(tmp_path, changes):
    assert shape_of(tmp_path, **changes).rope_theta == 5e5


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_parameters_of_rope_that_are_no_mapping_are_refused(tmp_path, key):
    with pytest.raises(UnsupportedModelError, match=rf"config.json: {key}: \[8.0\] is not allowed; allowed: a mapping"):
        shape_of(tmp_path, **{key: [8.0]})
    with pytest.raises(UnsupportedModelError, match=rf"text_config\.{key}: 'yarn' is not allowed"):
        shape_of(tmp_path, text_config={key: "yarn"})


def test_a_mixture_of_experts_is_read(tmp_path):
    shape = shape_of(tmp_path, **MIXTURE)
    assert shape.moe == MoeShape(experts=128, top_k=8, ffn=768, normalised=True)
    assert shape.head_dim == 128
    renamed = {key: value for key, value in MIXTURE.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert shape_of(tmp_path, **renamed).moe.experts == 16


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [0, 3]}, (0, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
    ],
)
def test_layers_that_are_no_mixture_are_those_of_hugging_face(tmp_path, changes, dense):
    moe = shape_of(tmp_path, **MIXTURE, num_hidden_layers=6, **changes).moe
    assert moe.dense_layers == dense


def test_a_mixture_whose_layers_are_all_dense_is_none(tmp_path):
    assert shape_of(tmp_path, **MIXTURE, mlp_only_layers=list(range(30))).moe is None
    assert shape_of(tmp_path, **MIXTURE | {"num_experts": 0}).moe is None


def test_an_old_style_llama3_scaling_is_read(tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    rope = shape_of(tmp_path, rope_theta=5e5, rope_scaling=scaling).rope
    assert rope.scaling == RopeScaling(kind="llama3", factor=8, original_length=8192, slow=1, fast=4)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        YARN,
        {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(tmp_path, parameters):
    parameters = {**parameters, "rope_theta": 1e6}
    shape = shape_of(tmp_path, rope_parameters=parameters, max_position_embeddings=131072)
    config = transformers.LlamaConfig(
        hidden_size=576, num_attention_heads=9, rope_parameters=parameters, max_position_embeddings=131072
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)
    torch.testing.assert_close(shape.rope.frequencies(64), frequencies, rtol=1e-6, atol=0)
    assert shape.rope.attention == pytest.approx(factor, rel=1e-12)
    assert shape.softmax_scale == pytest.approx(factor**2 / 8, rel=1e-12)


@pytest.mark.parametrize("window", [None, 4096, 8192])
def test_a_sliding_window_as_long_as_the_context_is_none(tmp_path, window):
    assert shape_of(tmp_path, **MISTRAL, sliding_window=window, max_position_embeddings=4096).layers == 30


def test_sigmoid_experts_shared_ones_and_layers_that_are_not_built_are_read(tmp_path):
    shape = shape_of(tmp_path, **GLM_MOE)
    assert (shape.qkv_bias, shape.qk_norm, shape.rope.part, shape.unbuilt_layers) == (True, False, 0.5, 1)
    assert shape.moe == MoeShape(
        experts=128, top_k=8, ffn=1408, normalised=True, dense_layers=(0,), sigmoid=True, shared_ffn=1408
    )
    assert [is_unbuilt(f"model.layers.{layer}.eh_proj.weight", shape) for layer in (29, 30, 31)] == [False, True, False]
    assert shape_of(tmp_path, **GLM_MOE | {"first_k_dense_replace": 99}).moe is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not supported; allowed: .*LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration is not supported"),
        ({"architectures": None}, "architecture none"),
        ({"vision_config": {"depth": 2}}, "vision_config="),
        ({"text_config": {"num_hidden_layers": 2}}, "text_config="),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 8}},
            "RoPE scaling 'longrope' .* llama3, yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 8}}, "RoPE scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "RoPE scaling 'linear' has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "RoPE scaling 'llama3' has no low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "has no original_max_position_embeddings"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"attention_bias": True}, "attention_bias=True is not supported; allowed: False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        (
            {**MISTRAL, "sliding_window": 4096, "max_position_embeddings": 32768},
            "sliding_window=4096 .* at least",
        ),
        ({**MISTRAL, "max_position_embeddings": 32768}, "sliding_window=4096"),  # what Mistral's code takes without it
        ({"hidden_size": None}, r"config\.json: hidden_size=None is not allowed; allowed: a whole number above 0"),
        ({**MIXTURE, "moe_intermediate_size": "768"}, "moe_intermediate_size='768' is not allowed"),
        ({**MIXTURE, "num_experts_per_tok": 200}, "num_experts_per_tok=200 is not allowed; allowed: 2 to 128"),
        ({**MIXTURE, "num_experts_per_tok": 1}, "num_experts_per_tok=1 is not allowed; allowed: 2 to 128"),
        ({**MIXTURE, "num_experts_per_tok": 0, "norm_topk_prob": False}, "num_experts_per_tok=0 .* allowed: 1 to 128"),
        ({"num_key_value_heads": "3"}, "num_key_value_heads='3' is not allowed; allowed: a whole number above 0"),
        ({"head_dim": -64}, "head_dim=-64 is not allowed"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 is not allowed; allowed: a divisor of 9"),
        ({**GLM_MOE, "num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported; allowed: 2 to 128"),
        ({**GLM_MOE, "n_group": 8}, "n_group=8 is not supported; allowed: 1"),
        ({**GLM_MOE, "norm_topk_prob": False}, "norm_topk_prob=False is not supported; allowed: True"),
        ({**GLM_MOE, "n_shared_experts": 0}, "n_shared_experts=0 is not allowed"),
        ({**GLM_MOE, "partial_rotary_factor": 2.0}, r"partial_rotary_factor=2\.0 is not allowed; allowed: above 0"),
        ({**GLM_MOE, "rope_scaling": YARN}, r"RoPE scaling 'yarn' with partial_rotary_factor=0\.5 is not supported"),
        (
            {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True},
            "attention_out_bias=True is not supported",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(tmp_path, changes, text):
    with pytest.raises(UnsupportedModelError, match=text):
        shape_of(tmp_path, **changes)


@pytest.mark.parametrize("key", [key for key in LLAMA if key.endswith("_size") or key.startswith("num_h")])
def test_a_missing_size_is_refused_by_name(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k != key}))
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key} is missing"):
        read_shape(tmp_path)


@pytest.mark.parametrize(("text", "said"), [("{", r"config\.json is not JSON"), ("[]", "is no mapping of keys")])
def test_a_configuration_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=said):
        read_shape(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        read_shape(tmp_path)
