"""Of which layers a model is built."""

from __future__ import annotations

import torch
from learner_parts import make_config

from streamrl.device import Device
from streamrl.learner import model
from streamrl.learner.model import choose_layers


def test_the_choice_of_layers_says_why(monkeypatch):
    assert str(choose_layers(Device("cpu", 0), torch.float32)).startswith("local layers: no CUDA")
    monkeypatch.setattr(model, "te_problem", lambda: "is not installed")
    assert "Transformer Engine is not installed" in choose_layers(Device("cuda", 0), torch.bfloat16).reason
    monkeypatch.setattr(model, "te_problem", lambda: None)
    assert choose_layers(Device("cuda", 0), torch.bfloat16).kind == "transformer_engine"
    assert choose_layers(Device("cuda", 0), torch.float32).kind == "local"


def test_a_cut_weight_is_marked_as_a_shard_so_that_the_gradient_norm_counts_it_on_every_rank(model_folder, trainer_of):
    built = trainer_of(make_config(model_folder("qwen3_moe")))._chunks[0]
    cut = {name for name, parameter in built.named_parameters() if getattr(parameter, "tensor_model_parallel", False)}
    whole = {name for name, _ in built.named_parameters()} - cut
    assert all("norm" in name or name.endswith("router.weight") for name in whole)
    assert not any("norm" in name for name in cut)
    experts = {name for name, parameter in built.named_parameters() if not getattr(parameter, "allreduce", True)}
    assert experts == {name for name, _ in built.named_parameters() if ".experts." in name}
