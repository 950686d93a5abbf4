"""A model family in a file of the user's own, which the configuration names by its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.learner.families._missing import MISSING
from streamrl.learner.mapping import tensor_names
from streamrl.learner.shape import UnsupportedModelError, read_shape

OWN = '''
from streamrl.learner.families.base import IN_A_LAYER, ModelFamily


class Renamed(ModelFamily):
    """Qwen2 whose MLP has other names."""

    architectures = ("RenamedForCausalLM",)
    qkv_bias = True
    in_a_layer = {
        **IN_A_LAYER,
        "mlp.linear_fc1.weight": ("gate_and_up", ("mlp.gate.weight", "mlp.up.weight")),
        "mlp.linear_fc2.weight": ("columns", ("mlp.down.weight",)),
    }

    @classmethod
    def megatron(cls, shape):
        return {"layernorm_epsilon": shape.norm_eps}
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "renamed.py").write_text(OWN)
    return f"{tmp_path}/renamed.py:Renamed"


def test_a_family_of_ones_own_reads_the_model_by_its_own_table_of_names(own, model_folder, tmp_path):
    folder = model_folder("qwen2")
    built_in, shape = read_shape(folder), read_shape(folder, family=own)
    assert (shape.layers, shape.qkv_bias) == (built_in.layers, True)
    names = set(tensor_names(shape))
    assert "model.layers.0.mlp.down.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" not in names
    assert len(names) == len(set(tensor_names(built_in)))


def test_a_family_by_its_path_is_the_family_by_its_architecture(model_folder):
    folder = model_folder("qwen2")
    assert read_shape(folder) == read_shape(folder, family="streamrl.learner.families.qwen2:Qwen2")
    assert read_shape(folder) == read_shape(folder, family="qwen2")


def test_an_unknown_architecture_says_how_to_bring_a_family(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["RenamedForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match=r"RenamedForCausalLM is not supported; .* by model\.family"):
        read_shape(tmp_path)


@pytest.mark.parametrize("architecture", MISSING)
def test_an_architecture_of_a_known_recipe_says_what_is_missing(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "vision_config": {}}))
    with pytest.raises(UnsupportedModelError) as refused:
        read_shape(tmp_path)
    told = f"architecture {architecture} is not trained, only served and evaluated; missing: {MISSING[architecture]}; "
    assert told in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_family_that_is_none_is_refused_before_anything_starts(own):
    assert config_file.load(None, [f"model.family={own}"]).model.family == own
    with pytest.raises(
        ConfigError, match=r"^override model\.family: qwen5 is not allowed; .*nearest known value: qwen3"
    ):
        config_file.load(None, ["model.family=qwen5"])
    with pytest.raises(ConfigError, match=r"^override model\.family: pathlib:Path is no subclass of .*ModelFamily"):
        config_file.load(None, ["model.family=pathlib:Path"])
