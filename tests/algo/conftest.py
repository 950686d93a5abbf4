"""Token batches for the tests of the algorithm, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from streamrl.algo.tokens import TokenBatch


@pytest.fixture
def token_batch() -> Callable[..., TokenBatch]:
    """`token_batch(seed, lengths=..., spread=...)`: random answers, log pi - log mu of about `spread` nats."""
    return _token_batch


def _token_batch(
    seed: int = 0,
    *,
    lengths: Sequence[int] = (5, 1, 7, 3, 6, 9),
    spread: float = 0.5,
    dtype: torch.dtype = torch.float64,
    **replaced: object,
) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    count = len(sample)

    def normal(size: int = count) -> torch.Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    behaviour = -normal().abs() - 0.5
    fields: dict[str, object] = {
        "logprobs": (behaviour + spread * normal()).to(dtype).requires_grad_(),
        "entropy": normal().abs().to(dtype).requires_grad_(),
        "behaviour": behaviour.to(dtype),
        "advantages": normal(len(lengths))[sample].to(dtype),
        "mask": torch.rand(count, generator=random) < 0.8,
        "staleness": torch.randint(0, 12, (count,), generator=random),
        "sample": sample,
        "samples": len(lengths),
        "proximal": (behaviour + spread * normal()).to(dtype),
        "reference": (behaviour + spread * normal()).to(dtype),
        "outliers": torch.rand(count, generator=random) < 0.3,
        "covariant": torch.rand(count, generator=random) < 0.3,
    }
    fields["full_kl"] = normal().abs().to(dtype).requires_grad_()
    fields["teacher"] = (behaviour + spread * normal()).to(dtype)
    return TokenBatch(**(fields | replaced))  # type: ignore[arg-type]
