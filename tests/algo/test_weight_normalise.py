"""Normalised importance weights: their mean over a step, of tokens or of samples, whatever the micro batches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.losses_reference import slow_mean_weight
from streamrl.algo.importance import importance_weights, weight_sums
from streamrl.algo.ratios import log_ratio
from streamrl.config.algo import AlgoConfig
from tests.algo.test_losses import only


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_the_mean_equals_the_loop_and_is_the_same_for_every_split_into_micro_batches(token_batch, weight):
    batch = token_batch(3, spread=0.6)
    batch.behaviour[torch.tensor([2, 9])] = -math.inf
    config = AlgoConfig(proximal="recompute", weight=weight, weight_normalise=True, weight_cap=1.5, weight_gamma=0.8)
    total, count = weight_sums(batch, config).tolist()
    assert total / count == pytest.approx(slow_mean_weight(batch, config), abs=1e-12)
    measured = batch.mask & batch.behaviour.isfinite()
    assert count == pytest.approx(
        {"token": measured.sum().item(), "sequence": len(batch.sample[measured].unique())}[weight]
    )
    parts = torch.stack([weight_sums(only(batch, samples), config) for samples in ([4, 0], [2], [5, 1, 3])]).sum(0)
    assert parts.tolist() == pytest.approx([total, count], abs=1e-12)
    assert weight_sums(token_batch(0, lengths=()), config).tolist() == [0, 0]


def test_the_weights_of_a_step_have_a_mean_of_one_before_masks(token_batch):
    batch = token_batch(3, spread=0.6, mask=torch.ones(31, dtype=torch.bool))
    config = AlgoConfig(proximal="recompute", weight_normalise=True, mask="token", mask_high=1.2)
    total, count = weight_sums(batch, config).tolist()
    tokens = dataclasses.replace(batch, mean_weight=total / count)
    log_rho = log_ratio(batch.logprobs.detach(), batch.behaviour)
    assert batch.proximal is not None
    plain = config.model_copy(update={"mask": "none"})
    assert importance_weights(tokens, log_rho, batch.proximal, plain).weight.mean().item() == pytest.approx(1)
    kept = importance_weights(tokens, log_rho, batch.proximal, config)
    assert 0 < kept.masked.sum() < 31
    assert kept.weight.mean() < 1
