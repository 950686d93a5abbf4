"""Signal and noise of a gradient, from the gradients of its parts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.losses import policy_loss
from streamrl.choices import AGGREGATIONS
from streamrl.config.algo import AlgoConfig
from streamrl.learner import gradient_noise
from streamrl.learner.gradient_noise import NOISE, SIGNAL, GradientNoise, signal_and_noise
from streamrl.learner.step import shares_of, tokens_of


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [1, 2, 9, 20]])
def test_parts_of_any_size_tell_signal_and_noise_of_the_whole(sizes):
    """Tokens with the mean gradient (1, 2, 0) and variance 9 in each entry: the mean of n has a noise of 27 / n."""
    draws = torch.Generator().manual_seed(3)
    count, found = sum(sizes), torch.zeros(2, dtype=torch.float64)
    for _ in range(8000):
        tokens = torch.tensor([1.0, 2.0, 0.0]) + 3 * torch.randn(count, 3, generator=draws, dtype=torch.float64)
        parts = torch.stack([part.sum(0) / count for part in tokens.split(sizes)])
        whole = float(parts.sum(0).square().sum())
        estimate = signal_and_noise(whole, float(parts.square().sum()), sum((size / count) ** 2 for size in sizes))
        assert sum(estimate) == pytest.approx(whole)
        found += torch.tensor(estimate) / 8000
    assert found.tolist() == pytest.approx([5.0, 27 / count], rel=0.15)


def micro_batch(lengths: list[int]) -> SimpleNamespace:
    """What the loss reads of answers of such lengths, on-policy and of advantage 1."""
    tokens = sum(lengths)
    return SimpleNamespace(
        tokens=np.zeros(tokens, np.int64),
        behaviour=np.full(tokens, -1, np.float32),
        advantages=np.ones(tokens, np.float32),
        staleness=np.zeros(tokens, np.int64),
        sample=np.repeat(np.arange(len(lengths)), lengths),
        samples=len(lengths),
        rollout_tokens=None,
    )


@pytest.fixture
def parallel(alone):
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
def test_tokens_that_all_have_the_same_gradient_are_signal_alone_in_whichever_mean(parallel, monkeypatch, aggregation):
    norm = torch.nn.LayerNorm(3, bias=False)
    torch.nn.init.constant_(norm.weight, -0.2)  # log pi is -1, as log mu
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False), final_norm=norm)
    monkeypatch.setattr(gradient_noise, "policy_of", lambda chunk: model)
    noise = GradientNoise(norm, torch.device("cpu"))
    length = {"norm_length": 100} if aggregation == "sequence_sum_norm" else {}
    algo = AlgoConfig(loss="reinforce", weight="none", aggregation=aggregation, **length)
    micro_batches = [micro_batch([1000]), micro_batch([25] * 40)]
    with noise.observing(shares_of(micro_batches, algo)):
        for micro in micro_batches:
            norm(torch.zeros(1, 3))
            logprobs = (norm.weight @ torch.tensor([1.0, 2.0, 2.0])).expand(len(micro.tokens))
            tokens = tokens_of(micro, logprobs, torch.zeros_like(logprobs))
            policy_loss(tokens, algo, Denominators(tokens=2000, rollouts=41))[0].backward()
    scale = {"token_sum": 2000, "sequence_sum": 2000 / 41, "sequence_sum_norm": 20 / 41}.get(aggregation, 1.0)
    found = noise.metrics()
    assert found[SIGNAL] == pytest.approx(9 * scale**2, rel=1e-5)
    assert found[NOISE] == pytest.approx(0, abs=1e-5 * found[SIGNAL])
