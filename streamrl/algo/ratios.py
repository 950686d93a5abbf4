"""Ratios of policies, and their aggregates over a sample, all from log-probs and all finite."""

from __future__ import annotations

import torch
from torch import Tensor

# Log-ratios are clamped to +-20 before exp: e^20 = 4.9e8 and its square stay finite in float32.
LOG_RATIO_BOUND = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio clamped to +-LOG_RATIO_BOUND; beyond the bound the gradient is 0."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-LOG_RATIO_BOUND; beyond the bound the gradient is 0."""
    return bounded(log_ratio).exp()


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """`log p - log p'` of two policies: [n], finite for all finite inputs, not yet clamped to the bound."""
    return _finite(logprobs - others)


def product(log_ratios: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The log of the product over a token's sample: as `sample_sum`."""
    return sample_sum(log_ratios, sample, samples)


def geometric_mean(log_ratios: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The log of the geometric mean over a token's sample: as `sample_mean`."""
    return sample_mean(log_ratios, sample, samples)


def sample_sum(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The sum over a token's sample: [n], dtype and gradient of the input, the same for all its tokens.

    values: float [n]; sample: int64 [n] in 0..samples-1, whose tokens are all here. Summed in float64, so that the
    order of the tokens hardly matters.
    """
    return _finite(_sums(values, sample, samples), values.dtype).to(values.dtype)[sample]


def sample_mean(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """As `sample_sum`, of the mean."""
    means = _sums(values, sample, samples) / torch.bincount(sample, minlength=samples).clamp(min=1)
    return _finite(means, values.dtype).to(values.dtype)[sample]


def sample_max(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """As `sample_sum`, of the largest; values: >= 0, without gradient."""
    largest = torch.zeros(samples, dtype=values.dtype, device=values.device)
    return largest.scatter_reduce(0, sample, values, reduce="amax")[sample]


def _sums(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    total = torch.zeros(samples, dtype=torch.float64, device=values.device)
    return total.index_add(0, sample, values.double())


def sample_staleness(staleness: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The staleness of every token's sample, the largest of its tokens: int64 [n]."""
    oldest = torch.zeros(samples, dtype=staleness.dtype, device=staleness.device)
    return oldest.scatter_reduce(0, sample, staleness, reduce="amax")[sample]


def _finite(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Clamped to what the dtype (None: their own) holds without becoming infinite; NaN stays NaN."""
    largest = torch.finfo(dtype or values.dtype).max
    return values.clamp(-largest, largest)
