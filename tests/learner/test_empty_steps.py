"""A run that trains nothing fails, and says what became of its samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from learner_parts import make_batch
from msgspec.structs import replace
from test_role import Source, run

from streamrl.learner.batches import Delivery
from streamrl.learner.empty_steps import EmptySteps
from streamrl.observe.metrics import read_metrics
from streamrl.progress import RunFailedError
from streamrl.types import Batch, PolicyVersion, Sample
from tests.operations_table import documented


def emptied(batch: Batch, **fields: object) -> Batch:
    """The batch with placeholders for all samples, or with samples that have these fields."""

    def empty(sample: Sample) -> Sample:
        return replace(sample, **fields) if fields else Sample.placeholder(sample.prompt_ids)

    groups = [replace(group, samples=tuple(map(empty, group.samples))) for group in batch.groups]
    return replace(batch, groups=tuple(groups))


class Failures(Source):
    """Batches of nothing but placeholders, save those of `good` steps."""

    def __init__(self, good: tuple[int, ...] = ()) -> None:
        super().__init__(None)
        self.good = good

    def next(self, step: int, timeout: float) -> Delivery:
        delivery = super().next(step, timeout)
        assert delivery.batch is not None
        return delivery if step in self.good else Delivery("batch", emptied(delivery.batch), delivery.stats)


def test_steps_without_a_trained_token_end_the_run_with_what_became_of_the_samples(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as failed:
        run(tmp_path, Failures(good=(0, 1)), PolicyVersion(0), steps=20)
    samples = 8 * len(make_batch().samples)
    documented(
        "... steps in a row trained no token (learner.empty_steps: ...): of ... samples ...", str(failed.value), 1
    )
    assert str(failed.value).endswith(f"of {samples} samples {samples} failed (placeholders)")
    assert len(list(read_metrics(tmp_path))) == 2 + 8


def test_a_record_of_such_steps_is_trained_again_to_its_end(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, Failures(), PolicyVersion(0), steps=20, is_record=True)
    assert trainer.version.step == 20


def test_a_run_that_is_complete_and_trained_nothing_has_failed(tmp_path: Path) -> None:
    source = Failures()
    with pytest.raises(RunFailedError) as failed:
        run(tmp_path, source, PolicyVersion(0), steps=3)
    documented("the run has done all of its steps and trained no token: of ... samples ...", str(failed.value), 1)
    assert "end" not in [word[0] for word in source.told]  # the service is not told that it is complete


def test_a_run_that_trained_something_once_is_complete_and_steps_in_between_restart_the_count(
    tmp_path: Path,
) -> None:
    source = Failures(good=(7,))
    run(tmp_path, source, PolicyVersion(0), steps=14)
    assert source.told[-1] == ("end", PolicyVersion(14))


def test_what_former_starts_have_trained_counts(tmp_path: Path) -> None:
    run(tmp_path, Source(None), PolicyVersion(0), steps=3)
    run(tmp_path, Failures(), PolicyVersion(3), steps=5)
    run(tmp_path, Failures(), PolicyVersion(5), steps=5)  # a resume of a complete run


def test_every_fate_of_a_sample_is_told() -> None:
    batch = make_batch()
    empty, masked = np.empty(0, np.int32), np.zeros(len(batch.groups[0].samples[0].output_ids), np.bool_)
    counts = EmptySteps(limit=1)
    one = replace(batch, groups=batch.groups[:1])
    nothing = {
        "output_ids": empty,
        "logprobs": empty.view(np.float32),
        "loss_mask": empty.astype(np.bool_),
        "spans": (),
    }
    for spoiled, fate in (
        (emptied(one), "failed (placeholders)"),
        (replace(emptied(one), quarantined=frozenset({0})), "could not be trained (quarantined)"),
        (emptied(one, **nothing), "were empty"),
        (emptied(one, loss_mask=masked, finish_reason="length"), "ended with length and have no token that is trained"),
    ):
        counts.add(spoiled)
        assert fate in (counts.verdict(complete=False) or "")


def test_0_never_ends_a_run_before_its_last_step() -> None:
    counts = EmptySteps(limit=0)
    for step in range(50):
        counts.add(emptied(make_batch(step)))
    assert counts.verdict(complete=False) is None
    assert counts.verdict(complete=True) is not None
