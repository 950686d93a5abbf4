"""What a batch says by itself: rewards, staleness and lengths, as metrics of its step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from streamrl.tasks.environment import FAILED
from streamrl.types import FAILURES, Batch, Sample


def batch_metrics(batch: Batch) -> dict[str, float]:
    """The `reward/`, `samples/`, `staleness/`, `length/` and `tokens/trained` metrics of one batch.

    Staleness counts every trained token (`token_ages`). Placeholders count in no reward and no length.
    """
    samples = [sample for sample in batch.samples if not sample.is_placeholder]
    rewards = np.array([sample.reward for sample in samples] or [0.0])
    lengths = np.array([len(sample.output_ids) for sample in samples] or [0])
    trained = [token_ages(sample, batch.step)[sample.loss_mask] for sample in samples]
    ages = np.concatenate(trained) if any(map(len, trained)) else np.zeros(1, np.int32)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/failed": sum(FAILED in sample.reward_parts for sample in samples),
        "pass_rate": float(np.mean([sample.passed for sample in samples] or [False])),
        "signal_rate": float(np.mean([group.has_signal for group in batch.groups])),
        "tokens/trained": sum(group.trained_tokens for group in batch.groups),
        "staleness/mean": float(ages.mean()),
        "staleness/p95": float(np.percentile(ages, 95, method="higher")),
        "staleness/max": int(ages.max()),
        "length/mean": float(lengths.mean()),
        "length/p95": float(np.percentile(lengths, 95, method="higher")),
        "quarantined": len(batch.quarantined),
        **failed_samples(batch),
    }


def failed_samples(batch: Batch) -> dict[str, float]:
    """How many samples of a batch have failed, and for each reason how many of them; a reason without any is absent."""
    reasons = Counter(sample.failure for sample in batch.samples if sample.is_placeholder)
    failed = {f"samples/failed_{reason}": reasons[reason] for reason in FAILURES if reasons[reason]}
    return {"samples/all": len(batch.samples), "samples/failed": reasons.total(), **failed}


def token_ages(sample: Sample, step: int) -> np.ndarray:
    """Staleness of every output token at learner step `step`, in steps: int32 [T].

    Never below 0: after a crash a lost group may have been generated again by newer weights than it trains.
    """
    return np.maximum(step - sample.token_steps(), 0)
