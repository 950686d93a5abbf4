"""Every model family on Transformer Engine's layers: of what it is made, under which names, with whose weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file

from benchmarks.random_models import ENGINE_FAMILIES, FAMILIES, LOCAL_FAMILIES
from streamrl.choices import FAMILIES as FAMILY
from streamrl.config.file import ConfigError
from streamrl.learner import lora
from streamrl.learner.huggingface import export_folder, load_weights
from streamrl.learner.lora_engine import AdaptedEngineColumn, AdaptedEngineRow
from streamrl.learner.lora_folder import export_adapters, load_adapters
from streamrl.learner.mapping import named_weights, place, tensor_names
from streamrl.learner.model import padded
from streamrl.publish.peft import write_adapter

ON_ATTENTION = ["linear_qkv", "linear_proj"]
ON_ALL = [*ON_ATTENTION, "linear_fc1", "linear_fc2"]


def targets(family: str) -> list[str]:
    """Layers of this family that can have adapters."""
    found = FAMILY.load(family)
    return [target for target in (ON_ATTENTION if found.experts else ON_ALL) if target not in found.without_adapters]


def adapters_of(family: str) -> dict[str, Any]:
    return {"rank": 4, "alpha": 6, "targets": targets(family)}


def test_every_family_is_here():
    assert set(FAMILY.names) <= FAMILIES.keys()


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_its_layers_are_transformer_engines_and_its_experts_are_grouped(family, model_folder, learner):
    model = learner(model_folder(family)).model
    assert model.layers.kind == "transformer_engine"
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        assert isinstance(attention.core_attention, TEDotProductAttention)
        assert type(attention.linear_qkv) is TELayerNormColumnParallelLinear
        assert type(attention.linear_proj) is TERowParallelLinear
        if isinstance(mlp, MoELayer):
            assert isinstance(mlp.experts, TEGroupedMLP)
            assert isinstance(mlp.experts.linear_fc1, TEColumnParallelGroupedLinear)
            assert isinstance(mlp.experts.linear_fc2, TERowParallelGroupedLinear)
        else:
            assert type(mlp.linear_fc1) is TELayerNormColumnParallelLinear
            assert type(mlp.linear_fc2) is TERowParallelLinear
    scaled = model.shape.rotary_gain != 1  # LongRoPE turns and lengthens: Transformer Engine only turns
    assert model.config.apply_rope_fusion is not (model.shape.rope.interleaved or scaled)
    assert model.config.bias_activation_fusion


@pytest.mark.parametrize("family", LOCAL_FAMILIES)
def test_a_family_with_layers_of_its_own_has_none_of_the_engines_and_every_weight_comes_back(
    family, model_folder, learner, tmp_path
):
    folder = model_folder(family)
    model = learner(folder).model
    assert model.layers.kind == "local"
    of_engine = ("transformer_engine.", "megatron.core.extensions.transformer_engine")
    assert not [module for module in model.modules() if type(module).__module__.startswith(of_engine)]
    load_weights([model], folder)
    export_folder([model], folder, tmp_path / "written")
    written, stored = (load_file(each / "model.safetensors") for each in (tmp_path / "written", folder))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor.to(written[name].dtype)) for name, tensor in stored.items())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_every_parameter_has_its_hugging_face_names_and_every_weight_comes_back(
    family, rank, model_folder, learner, tmp_path
):
    folder = model_folder(family)
    lora_settings = adapters_of(family) if rank else {}
    model = learner(folder, lora=lora_settings).model
    layers = range(model.shape.layers)
    named = set()
    for name, _ in named_weights(model):
        if not lora.is_adapter_parameter(name):
            at = place(name, model.shape, layers)
            named.update(at.names if at.expert is None else at.names_of(at.expert))
    assert named == set(tensor_names(model.shape))
    load_weights([model], folder)
    export_folder([model], folder, tmp_path / "written")
    written, stored = (load_file(each / "model.safetensors") for each in (tmp_path / "written", folder))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor.to(written[name].dtype)) for name, tensor in stored.items())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_a_checkpoint_names_its_weights_as_the_local_layers_do(family, rank, model_folder, learner):
    settings = {"lora": adapters_of(family)} if rank else {}
    made = learner(model_folder(family), **settings)
    engine = sharded_keys(made)
    assert engine == sharded_keys(learner(model_folder(family), engine=False, **settings))


def sharded_keys(made: Any) -> set[str]:
    """The keys of the model's weights in a checkpoint, without Transformer Engine's states for FP8."""
    from streamrl.learner.conversion import _engine_names, _sharded

    made.model.decoder.config.moe_layer_freq = 1
    weights = {
        name: value
        for name, value in _sharded(made.model, {"singleton_local_shards": False}).items()
        if not isinstance(value, ShardedObject)
    }
    renamed = {} if made.model.layers.kind == "transformer_engine" else _engine_names(made.model, weights)
    return {renamed.get(name, value.key) for name, value in weights.items()}


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_adapters_are_on_transformer_engines_layers_and_go_out_as_they_came_in(family, model_folder, learner, tmp_path):
    folder = model_folder(family)
    made = learner(folder, lora=adapters_of(family))
    settings = made.config.learner.lora
    chunks = [made.model]
    for _, module in lora.adapters(chunks):
        kind = AdaptedEngineColumn if module.target in ("linear_qkv", "linear_fc1") else AdaptedEngineRow
        assert type(module) is kind
    assert len(list(lora.adapters(chunks))) == 2 * len(settings.targets)
    mixtures = [layer.mlp for layer in made.model.decoder.layers if isinstance(layer.mlp, MoELayer)]
    assert all(isinstance(mlp.experts, TEGroupedMLP) for mlp in mixtures)
    assert bool(mixtures) == FAMILY.load(family).experts

    fresh = sorted(export_adapters(chunks))
    given = {name: torch.randn_like(tensor).bfloat16() for name, tensor in fresh}
    write_adapter(tmp_path / "adapter", given.items(), settings, folder)
    load_adapters(chunks, tmp_path / "adapter", settings)
    out = dict(export_adapters(chunks))
    assert out.keys() == given.keys()
    assert not [name for name, tensor in given.items() if not torch.equal(out[name], tensor)]


def test_adapters_on_experts_are_refused_in_one_line(model_folder, learner):
    with pytest.raises(ConfigError) as refused:
        learner(model_folder("qwen3_moe"), lora={"rank": 4, "targets": ON_ALL})
    assert str(refused.value).startswith("learner.lora.targets: linear_fc1 is a layer of experts")
    assert len(str(refused.value).splitlines()) == 1


def test_a_layer_without_an_adapter_keeps_its_norm_inside(model_folder, learner):
    made = learner(model_folder("qwen2"), lora={"rank": 4, "targets": ["linear_proj", "linear_fc1"]})
    for layer in made.model.decoder.layers:
        assert type(layer.self_attention.linear_qkv) is TELayerNormColumnParallelLinear
        assert list(layer.input_layernorm.parameters()) == []
        assert [tuple(each.shape) for each in layer.pre_mlp_layernorm.parameters()] == [(64,)]


def test_fp8_and_other_fields_of_megatrons_are_taken_by_its_configurations(model_folder, learner):
    fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "moe_router_dtype": "fp32"}
    model = learner(model_folder("qwen3_moe"), megatron=fields).model
    assert {name: getattr(model.config, name) for name in fields} == fields
    assert padded(61, model.config) == 64
