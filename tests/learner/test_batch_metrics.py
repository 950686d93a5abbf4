"""What the metrics of a step say about the samples that failed."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from streamrl.learner.batch_metrics import batch_metrics
from streamrl.observe.metrics import NAMES, is_known
from streamrl.types import FAILURES, Batch, Group, Sample


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
        "samples/all": 8,
        "samples/failed": 6,
        "samples/failed_too_long": 1,
        "samples/failed_lost": 4,
    }
    assert all(map(is_known, metrics))


def test_every_reason_has_a_metric() -> None:
    assert {f"samples/failed_{reason}" for reason in FAILURES} < NAMES


def test_a_quarantined_group_says_so(make_group: Callable[..., Group]) -> None:
    assert [sample.failure for sample in make_group(samples=2).emptied.samples] == ["quarantined"] * 2
