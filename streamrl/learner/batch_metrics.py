"""What a batch says by itself: rewards, staleness and lengths, as metrics of its step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from streamrl.config import Config
from streamrl.learner.reward_parts import RewardParts, sanitised
from streamrl.tasks.environment import FAILED
from streamrl.types import FAILURES, Batch, Sample


class BatchMetrics:
    """All metrics of the batches of one run, one after another."""

    def __init__(self, config: Config, former: Iterable[Mapping[str, Any]] = ()) -> None:
        """`former`: the rows of former starts of the run."""
        self._tasks = [share.key for share in config.task.trained]
        self._parts = RewardParts(former)

    def of(self, batch: Batch) -> dict[str, float]:
        """Those of a batch alone, its reward parts, and in a mix those of each task."""
        tasks = task_metrics(batch, self._tasks) if len(self._tasks) > 1 else {}
        return batch_metrics(batch) | self._parts.of(batch) | tasks


def batch_metrics(batch: Batch) -> dict[str, float]:
    """The `reward/`, `samples/`, `staleness/`, `length/` and `tokens/trained` metrics of one batch.

    Staleness and `tokens/trained` count every trained token (`token_ages`). A rollout counts once, at its first step:
    in rewards, lengths and failures there is nothing of groups that an earlier step had (`replay.reuse`), and in
    rewards and lengths nothing of placeholders. Rewards and failures count rollouts, lengths samples.
    A batch without any answer, as one whose groups are all quarantined, has no reward and no pass rate, and one without
    a trained token no staleness: NaN, not 0.
    """
    fresh = batch.fresh
    drawn = [sample for group in fresh for sample in group.samples]
    samples = [sample for sample in drawn if not sample.is_placeholder]
    judged = [sample for group in fresh for sample in group.answered]
    failed = sum(FAILED in sample.reward_parts for sample in judged)
    unjudged = sum(sample.failure == "scorer" for sample in drawn)
    rewards = np.array([sample.reward for sample in judged] or [math.nan])
    lengths = np.array([len(sample.output_ids) for sample in samples] or [0])
    trained = [token_ages(sample, batch.step)[sample.loss_mask] for sample in batch.samples]
    ages = np.concatenate(trained) if any(map(len, trained)) else np.array([math.nan])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/failed": failed,
        "reward/failed_share": (failed + unjudged) / max(1, sum(group.size for group in fresh)),
        "pass_rate": float(np.mean([sample.passed for sample in judged])) if judged else math.nan,
        "signal_rate": float(np.mean([group.has_signal for group in fresh])),
        "tokens/trained": sum(group.trained_tokens for group in batch.groups),
        "staleness/mean": float(ages.mean()),
        "staleness/p95": float(np.percentile(ages, 95, method="higher")),
        "staleness/max": ages.max().item(),
        "length/mean": float(lengths.mean()),
        "length/p95": float(np.percentile(lengths, 95, method="higher")),
        "length/cut": float(np.mean([sample.finish_reason == "length" for sample in samples] or [False])),
        "samples/masked": sum(not sample.loss_mask.any() for sample in samples),
        "quarantined": len(batch.quarantined),
        **failed_samples(batch),
    }


def task_metrics(batch: Batch, tasks: Iterable[str]) -> dict[str, float]:
    """`task/TASK/` of each task: its share of the groups; mean reward and pass rate where it has a sample."""
    metrics: dict[str, float] = {}
    for task in tasks:
        groups = [group for group in batch.groups if group.task == task]
        samples = [sample for group in batch.fresh if group.task == task for sample in group.answered]
        name = f"task/{sanitised(task)}/"
        metrics[name + "groups"] = len(groups) / max(1, len(batch.groups))
        if samples:
            metrics[name + "reward/mean"] = float(np.mean([sample.reward for sample in samples]))
            metrics[name + "pass_rate"] = float(np.mean([sample.passed for sample in samples]))
    return metrics


def failed_samples(batch: Batch) -> dict[str, float]:
    """How many new rollouts of a batch have failed, and how many for each reason; a reason without any is absent."""
    samples = [sample for group in batch.fresh for sample in group.samples]
    reasons = Counter(sample.failure for sample in samples if sample.is_placeholder)
    failed = {f"samples/failed_{reason}": reasons[reason] for reason in FAILURES if reasons[reason]}
    rollouts = sum(group.size for group in batch.fresh)
    several = len(samples) > rollouts
    branches = {"samples/branches": len(samples) / rollouts} if several else {}
    return {"samples/all": rollouts, **branches, "samples/failed": reasons.total(), **failed}


def token_ages(sample: Sample, step: int) -> np.ndarray:
    """Staleness of every output token at learner step `step`, in steps: int32 [T].

    Never below 0: after a crash a lost group may have been generated again by newer weights than it trains.
    """
    return np.maximum(step - sample.token_steps(), 0)
