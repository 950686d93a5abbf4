"""What a batch says by itself: rewards, staleness and lengths, as metrics of its step."""

from __future__ import annotations

import numpy as np

from streamrl.types import Batch, Sample


def batch_metrics(batch: Batch) -> dict[str, float]:
    """The `reward/`, `staleness/`, `length/` and `tokens/trained` metrics of one batch.

    Staleness counts every trained token: `batch.step - version.step` of the token. Placeholders count
    in no reward and no length.
    """
    samples = [sample for sample in batch.samples if not sample.is_placeholder]
    rewards = np.array([sample.reward for sample in samples] or [0.0])
    lengths = np.array([len(sample.output_ids) for sample in samples] or [0])
    ages = np.concatenate([_ages(sample, batch.step) for sample in samples] or [np.zeros(0, np.int32)])
    ages = ages if len(ages) else np.zeros(1, np.int32)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "pass_rate": float(np.mean([sample.passed for sample in samples] or [False])),
        "signal_rate": float(np.mean([group.has_signal for group in batch.groups])),
        "tokens/trained": sum(group.trained_tokens for group in batch.groups),
        "staleness/mean": float(ages.mean()),
        "staleness/p95": float(np.percentile(ages, 95, method="higher")),
        "staleness/max": int(ages.max()),
        "length/mean": float(lengths.mean()),
        "length/p95": float(np.percentile(lengths, 95, method="higher")),
    }


def _ages(sample: Sample, step: int) -> np.ndarray:
    """Staleness of every trained token of a sample: int32 [trained tokens]."""
    return (step - sample.token_steps())[sample.loss_mask]
