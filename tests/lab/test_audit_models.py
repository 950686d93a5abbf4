"""The audit computes log-probs with the weights of a version, in every family of models."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch import tiny_model
from streamrl.lab.audit import load_kept


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
def test_the_weights_of_a_version_are_those_that_are_audited(family, tmp_path):
    tiny_model.make(tmp_path / "base", seed=1, family=family)
    tiny_model.make(tmp_path / "trained", seed=2, family=family)
    kept = tmp_path / "kept"  # weights alone, without a configuration
    kept.mkdir()
    shutil.copy(tmp_path / "trained" / "model.safetensors", kept)
    audited = load_kept(kept, AutoConfig.from_pretrained(tmp_path / "base"), tmp_path / "base")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    ids = torch.tensor([[1, 4, 2, 7]])
    with torch.no_grad():
        assert torch.equal(audited(ids).logits, trained(ids).logits)
        assert not audited.training

    weights = load_file(kept / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, kept / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights missing \['model.norm.weight'\], unexpected \[\]"):
        load_kept(kept, AutoConfig.from_pretrained(tmp_path / "base"), tmp_path / "base")
