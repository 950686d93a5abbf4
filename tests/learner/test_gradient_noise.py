"""Signal and noise of a gradient, from the gradients of its parts."""

from __future__ import annotations

import pytest
import torch

from streamrl.learner.gradient_noise import signal_and_noise


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
