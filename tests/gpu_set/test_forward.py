"""Transformer Engine's layers, their kernels written in torch, give the numbers of the local layers.

What is seen is the wiring: which norm, bias, angle, sequence and adapter meets which token. The kernels are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_kernels
from engine_learner import log_probs_and_gradients
from torch import Tensor

from benchmarks.random_models import FAMILIES, largest_difference, make_batch
from streamrl.learner import lora
from streamrl.learner.huggingface import load_weights

NEAR = 2e-5  # of float32 sums in another order


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_kernels.install(monkeypatch)


def found(learner: Callable[..., Any], folder: Any, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return log_probs_and_gradients(learner(folder, dtype="float32", **settings))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_local_layers(family, rank, model_folder, learner, kernels):
    targets = ["linear_qkv", "linear_proj"] + ([] if family == "qwen3_moe" else ["linear_fc1", "linear_fc2"])
    settings = {"lora": {"rank": 4, "targets": targets}} if rank else {}
    ours = found(learner, model_folder(family), **settings)
    local = found(learner, model_folder(family), engine=False, **settings)
    torch.testing.assert_close(ours[0], local[0], rtol=NEAR, atol=NEAR)
    torch.testing.assert_close(ours[1], local[1], rtol=NEAR, atol=NEAR)
    common = ours[2].keys() & local[2].keys()
    assert "embedding.word_embeddings.weight" in common or rank
    assert len(common) >= (2 * 2 * len(targets) if rank else 8)
    assert largest_difference({n: ours[2][n] for n in common}, {n: local[2][n] for n in common}) < 10 * NEAR


def test_an_adapter_that_is_switched_off_changes_nothing(model_folder, learner, kernels):
    folder = model_folder("qwen2")
    made = learner(folder, dtype="float32", lora={"rank": 4})
    load_weights([made.model], folder)
    lora.draw([made.model], seed=1)
    with torch.no_grad():
        for _, module in lora.adapters([made.model]):
            module.lora_b.fill_(0.1)
        with lora.disabled([made.model]):
            without, _ = made.log_probs(make_batch())
        adapted, _ = made.log_probs(make_batch())
    plain = learner(folder, dtype="float32")
    load_weights([plain.model], folder)
    with torch.no_grad():
        base, _ = plain.log_probs(make_batch())
    torch.testing.assert_close(without, base, rtol=NEAR, atol=NEAR)
    assert (adapted - base).abs().max() > 0.01
