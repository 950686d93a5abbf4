"""Which models are built, and of which layers."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from streamrl.device import Device
from streamrl.learner.model import choose_layers
from streamrl.learner.shape import UnsupportedModelError, read_shape

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


def shape_of(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_shape(tmp_path)


def test_a_shape_has_what_the_configuration_says(tmp_path):
    shape = shape_of(tmp_path)
    assert (shape.heads, shape.groups, shape.head_dim, shape.tied) == (9, 3, 64, True)
    assert (shape.qkv_bias, shape.qk_norm, shape.norm_eps) == (False, False, 1e-5)
    assert shape.padded_vocabulary(tensor_parallel=1) == 49152
    assert shape_of(tmp_path, vocab_size=131).padded_vocabulary(tensor_parallel=2) == 256


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported; allowed: Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "RoPE scaling 'llama3' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "RoPE scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "RoPE scaling 'linear'"),
        ({"attention_bias": True}, "attention_bias=True is not supported; allowed: False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(tmp_path, changes, text):
    with pytest.raises(UnsupportedModelError, match=text):
        shape_of(tmp_path, **changes)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        read_shape(tmp_path)


def test_the_choice_of_layers_says_why(monkeypatch):
    assert str(choose_layers(Device("cpu", 0), torch.float32)).startswith("local layers: no CUDA")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Transformer Engine is not installed" in choose_layers(Device("cuda", 0), torch.bfloat16).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_layers(Device("cuda", 0), torch.bfloat16).kind == "transformer_engine"
    assert choose_layers(Device("cuda", 0), torch.float32).kind == "local"
