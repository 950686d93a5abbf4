"""The adapter of Megatron-Core to machines without CUDA."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from learner_parts import make_batch, make_config

from streamrl.config.file import ConfigError
from streamrl.learner import cpu_adapter
from streamrl.learner.cpu_adapter import UnsupportedMegatronError


@pytest.mark.parametrize("cuda", [False, True])
def test_another_version_of_megatron_is_refused_by_name(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    assert issubclass(UnsupportedMegatronError, ConfigError)
    with pytest.raises(UnsupportedMegatronError, match=r"megatron-core 0\.17\.0 is installed.* 0\.16\.1 alone"):
        cpu_adapter.install()


def test_where_cuda_is_there_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
    from megatron.core.transformer.moe import token_dispatcher

    trainer_of(make_config(model_folder()))
    patched = (optimizer.clip_grad_by_total_norm_fp32, token_dispatcher.all_to_all)
    cpu_adapter.install()
    assert patched == (optimizer.clip_grad_by_total_norm_fp32, token_dispatcher.all_to_all)


def test_the_router_of_experts_finds_the_name_that_only_transformer_engine_has(model_folder, trainer_of, monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    trainer_of(make_config(model_folder()))
    assert moe_utils.te_general_gemm is None
