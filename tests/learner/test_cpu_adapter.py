"""The adapter of Megatron-Core to machines without CUDA."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from learner_parts import make_batch, make_config

from streamrl.learner import cpu_adapter
from streamrl.learner.cpu_adapter import UnsupportedMegatronError


def test_another_version_of_megatron_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(UnsupportedMegatronError, match=r"megatron-core 0\.17\.0 is installed.* 0\.16\.1 alone"):
        cpu_adapter.install()


def test_where_cuda_is_there_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    before = torch.Tensor.type
    cpu_adapter.install()
    with cpu_adapter.cuda_type_names():
        assert torch.Tensor.type is before


def test_everybody_but_megatron_sees_torch_as_it_is(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    trainer.train_step(make_batch())
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_installing_again_changes_nothing(model_folder, trainer_of):
    from megatron.core.optimizer import optimizer

    trainer_of(make_config(model_folder()))
    clip = optimizer.clip_grad_by_total_norm_fp32
    cpu_adapter.install()
    assert optimizer.clip_grad_by_total_norm_fp32 is clip
