"""A server's mixtures of experts have as many levels of deepstack as the model says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from streamrl.engine import deepstack


@pytest.mark.parametrize("levels", [[], [0], [0, 1], [8, 16, 24], [1, 2, 3, 4]])
def test_a_language_model_has_the_levels_of_its_tower(levels):
    def build(self, config, name, *, prefix):
        self.model = SimpleNamespace(deepstack_embed_to_decoder_layer=range(3))
        self.built = (config, name, prefix)

    config = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=levels))
    served = SimpleNamespace()
    deepstack.with_levels(build)(served, config, "name", prefix="prefix")
    assert served.built == (config, "name", "prefix")
    assert served.model.deepstack_embed_to_decoder_layer == range(len(levels))


@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({}, False),
        ({"architectures": None}, False),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, False),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, True),
    ],
)
def test_a_model_is_known_by_its_configuration(config, has, tmp_path):
    assert not deepstack.has_levels(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert deepstack.has_levels(tmp_path) == has
