"""What the metrics of a step say about the samples that failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.learner import reward_parts
from streamrl.learner.batch_metrics import BatchMetrics, batch_metrics
from streamrl.learner.reward_parts import RewardParts, sanitised
from streamrl.observe.metrics import METRICS, NAMES, is_known
from streamrl.types import FAILURES, Batch, Group, PolicyVersion, Sample


def test_failed_samples_are_counted_by_reason_and_answers_without_a_score_apart(
    make_group: Callable[..., Group],
) -> None:
    good = make_group(0, samples=4)
    unscored = replace(good.samples[1], reward=-1.0, reward_parts={"failed": 1.0})
    failed = (Sample.placeholder(failure="too_long"), Sample.placeholder())  # one from before reasons were told
    mixed = replace(good, samples=(good.samples[0], unscored, *failed))
    lost = make_group(1, samples=4).as_placeholders("lost")
    metrics = batch_metrics(Batch(step=3, groups=(mixed, lost)))
    told = {name: value for name, value in metrics.items() if name.startswith(("samples/", "reward/failed"))}
    assert told == {
        "reward/failed": 1,
        "reward/failed_share": 1 / 8,
        "samples/masked": 0,
        "samples/all": 8,
        "samples/failed": 6,
        "samples/failed_too_long": 1,
        "samples/failed_lost": 4,
    }
    assert all(map(is_known, metrics))


def test_a_rollout_counts_once_however_often_it_is_trained(make_group: Callable[..., Group]) -> None:
    right, wrong = (
        replace(group, samples=tuple(replace(sample, reward=reward) for sample in group.samples))
        for group, reward in (
            (make_group(0, samples=2, tokens=9, version=PolicyVersion(0)), 1.0),
            (make_group(1, samples=2, tokens=5, version=PolicyVersion(2)), 0.0),
        )
    )
    lost = make_group(2, samples=2).as_placeholders("lost")
    config = Config.model_validate({"task": {"mix": [{"name": "copy"}, {"label": "other"}]}})
    batch = Batch(step=3, groups=(right, wrong, lost), reused=frozenset({0, 2}))
    once = BatchMetrics(config).of(Batch(step=3, groups=(wrong,)))
    metrics = BatchMetrics(config).of(batch)
    trained = {"tokens/trained", "task/copy/groups", "task/other/groups"} | {
        name for name in metrics if "stale" in name
    }
    assert {name: metrics[name] for name in metrics.keys() - trained} == {
        name: once[name] for name in once.keys() - trained
    }
    assert metrics["tokens/trained"] == 2 * 9 + 2 * 5
    whole = BatchMetrics(config).of(replace(batch, reused=frozenset()))
    assert {name: metrics[name] for name in trained} == {name: whole[name] for name in trained}
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx((3 * 9 + 1 * 5) / 14), 3)
    assert metrics["task/copy/groups"] == 1.0
    assert whole["reward/mean"] == 0.5


def test_every_reason_has_a_metric() -> None:
    assert {f"samples/failed_{reason}" for reason in FAILURES} < NAMES


def test_a_quarantined_group_says_so(make_group: Callable[..., Group]) -> None:
    assert [sample.failure for sample in make_group(samples=2).emptied.samples] == ["quarantined"] * 2


def test_a_batch_without_an_answer_has_no_reward_no_pass_rate_and_no_staleness(
    make_group: Callable[..., Group],
) -> None:
    metrics = batch_metrics(Batch(step=3, groups=(make_group(samples=2).emptied, make_group(1, samples=2).emptied)))
    unknown = {name for name, value in metrics.items() if np.isnan(value)}
    ages = {"staleness/mean", "staleness/p95", "staleness/max"}
    assert unknown == {"reward/mean", "reward/std", "pass_rate"} | ages
    group = make_group(samples=2)
    masked = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in group.samples]
    metrics = batch_metrics(Batch(step=3, groups=(replace(group, samples=tuple(masked)),)))
    assert {name for name, value in metrics.items() if np.isnan(value)} == ages


def with_parts(group: Group, *parts: dict[str, float]) -> Group:
    """The group with these parts of its samples' rewards."""
    samples = [replace(sample, reward_parts=each) for sample, each in zip(group.samples, parts, strict=True)]
    return replace(group, samples=tuple(samples))


def test_each_part_of_the_reward_has_its_mean_over_the_samples_that_have_it(make_group: Callable[..., Group]) -> None:
    group = with_parts(make_group(samples=4), {"format": 1.0, "exact": 0.0}, {"format": 0.5}, {"a b/c": 2.0}, {})
    lost = make_group(1, samples=2).as_placeholders("lost")
    failed = with_parts(make_group(2, samples=1), {"failed": 1.0})
    told = RewardParts().of(Batch(step=0, groups=(group, lost, failed)))
    assert told == {"reward/part/format": 0.75, "reward/part/exact": 0.0, "reward/part/a_b_c": 2.0}
    assert all(map(is_known, told))
    assert all(is_known(f"reward/part/{sanitised(name)}") for name in ("", "s0", "x" * 999, "ü ?", "a\nb"))


def test_the_first_names_of_a_run_keep_their_places_and_the_others_are_counted(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_parts, "MOST", 2)
    steps = [{"b": 1.0}, {"a": 1.0, "b": 2.0, "z": 3.0}, {"z": 4.0, "a": 5.0}]
    batches = [Batch(step=0, groups=(with_parts(make_group(samples=1), each),)) for each in steps]
    parts = RewardParts()
    rows = [parts.of(batch) for batch in batches]
    assert rows == [
        {"reward/part/b": 1.0},
        {"reward/part/a": 1.0, "reward/part/b": 2.0, "reward/parts_left_out": 1},
        {"reward/part/a": 5.0, "reward/parts_left_out": 1},
    ]
    assert RewardParts(rows[:2]).of(batches[2]) == rows[2]  # as the resumed run has it


def test_the_table_says_how_many_parts_there_are() -> None:
    meanings = {metric.name: metric.meaning for metric in METRICS}
    assert f"first {reward_parts.MOST} names" in meanings["reward/parts_left_out"]


def test_a_mix_has_the_figures_of_each_task_and_a_single_task_has_none(make_group: Callable[..., Group]) -> None:
    mix = {"task": {"mix": [{"label": "easy"}, {"name": "copy"}, {"label": "rare", "weight": 0.1}]}}
    hard = [make_group(1 + index, samples=1) for index in range(3)]  # of reward 0
    batch = Batch(step=0, groups=(make_group(samples=2, task="easy"), *hard))
    told = BatchMetrics(Config.model_validate(mix)).of(batch)
    assert all(map(is_known, told))
    assert {name: value for name, value in told.items() if name.startswith("task/")} == {
        "task/easy/groups": 0.25,
        "task/easy/reward/mean": 0.5,
        "task/easy/pass_rate": 0.5,
        "task/copy/groups": 0.75,
        "task/copy/reward/mean": 0.0,
        "task/copy/pass_rate": 0.0,
        "task/rare/groups": 0.0,
    }
    assert not any(name.startswith("task/") for name in BatchMetrics(Config()).of(batch))


def test_answers_that_were_cut_and_those_that_are_masked_are_counted(make_group: Callable[..., Group]) -> None:
    first, second, *others = make_group(samples=4).samples
    masked = replace(second, loss_mask=np.zeros_like(second.loss_mask))
    group = replace(make_group(), samples=(replace(first, finish_reason="length"), masked, *others))
    lost = make_group(1, samples=4).as_placeholders("scorer")
    told = batch_metrics(Batch(step=0, groups=(group, lost)))
    assert told["length/cut"] == 0.25
    assert told["samples/masked"] == 1
    assert told["reward/failed_share"] == 0.5


def test_rewards_and_failures_count_rollouts_and_lengths_their_branches(make_group: Callable[..., Group]) -> None:
    group = make_group(0, samples=5)  # with the rewards 0, 1, 2, 3, 4
    branched = replace(group, samples=(*group.samples[:4], Sample.placeholder(failure="branches")), branches=(1, 3, 1))
    branched.check()
    metrics = BatchMetrics(Config()).of(Batch(step=3, groups=(branched,)))
    assert (metrics["reward/mean"], metrics["reward/std"]) == (1.5, 1.5)
    assert metrics["reward/part/exact"] == 1.5
    assert (metrics["samples/all"], metrics["samples/failed"], metrics["samples/failed_branches"]) == (3, 1, 1)
    assert metrics["samples/branches"] == 5 / 3
    assert (metrics["tokens/trained"], metrics["length/mean"]) == (20, 5.0)
    assert all(map(is_known, metrics))
    assert "samples/branches" not in batch_metrics(Batch(step=3, groups=(group,)))
