"""Every model family passes what a user's own must pass; and one that breaks a promise does not."""

from __future__ import annotations

from typing import ClassVar

import pytest

from benchmarks.random_models import FAMILIES
from launch.tiny_vl_model import turned
from streamrl.choices import FAMILIES as KIND
from streamrl.learner.families.base import IN_A_LAYER
from streamrl.learner.families.qwen2 import Qwen2
from streamrl.testing.families import SIZES, ModelFamilyConformance

TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once

# In `make test`: those whose tables, layers or weights are unlike the others'; the rest are left to `make test-all`.
FAST = ("qwen2", "qwen3_moe", "glm4", "glm4_moe")

_OTHERS = {"nemotron_3": "nemotron_h"}  # further models of a family

for _name in (*KIND.names, *_OTHERS):
    _members = {"name": _OTHERS.get(_name, _name), "config": FAMILIES[_name][1], **TOGETHER}
    if not FAMILIES[_name][1].get("tie_word_embeddings", True):
        _members["ties"] = (False,)
    if _name == "qwen3_vl_moe":
        _members["stored_tensor"] = lambda self, name, tensor: turned(name, tensor, SIZES["hidden_size"])
    if _name not in FAST:
        _members["pytestmark"] = pytest.mark.slow
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (ModelFamilyConformance,), _members)


class Unnamed(Qwen2):
    """Another name for a tensor."""

    in_a_layer: ClassVar = {**IN_A_LAYER, "mlp.linear_fc2.weight": ("columns", ("mlp.down.weight",))}


class Crossed(Qwen2):
    """Two norms with each other's names."""

    in_a_layer: ClassVar = {
        **IN_A_LAYER,
        "input_layernorm.weight": IN_A_LAYER["pre_mlp_layernorm.weight"],
        "pre_mlp_layernorm.weight": IN_A_LAYER["input_layernorm.weight"],
    }


class OneRank(Qwen2):
    """Cuts columns as if they were rows, which one rank does not see."""

    in_a_layer: ClassVar = {**IN_A_LAYER, "mlp.linear_fc2.weight": ("rows", ("mlp.down_proj.weight",))}

    @classmethod
    def cuts(cls):
        from streamrl.learner.mapping import COLUMNS, Cut

        return {"rows": Cut(0, COLUMNS.join, COLUMNS.split)}


class Turned(Qwen2):
    """Gate and up change places on the way back."""

    @classmethod
    def cuts(cls):
        from streamrl.learner.mapping import GATE_AND_UP, Cut

        return {"gate_and_up": Cut(0, GATE_AND_UP.join, lambda _, part: part.chunk(2)[::-1])}


class Careless(Qwen2):
    """Refuses nothing."""

    @classmethod
    def refuse(cls, path, config):
        return


@pytest.mark.parametrize(
    ("own", "test"),
    [
        (Unnamed, "test_its_names_are_those_of_the_folder"),
        (Crossed, "test_its_logits_are_those_of_transformers"),
        (Turned, "test_every_weight_comes_back_bit_by_bit"),
        (OneRank, "test_a_parameter_that_is_cut_over_ranks_becomes_whole"),
        (Careless, "test_a_configuration_that_it_cannot_read_is_refused_in_one_line"),
    ],
)
def test_one_that_breaks_a_promise_is_found_out(own, test, tmp_path):
    conformance = ModelFamilyConformance()
    conformance.name = f"{__file__}:{own.__name__}"
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(conformance, test)(tmp_path)
