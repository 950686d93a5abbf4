"""Groups that the learner cannot train, with a real trainer: the run goes on without them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_parts import VOCABULARY, make_batch, make_config, weights
from msgspec.structs import replace

from streamrl.learner import bad_batch
from streamrl.learner.blame import Blame, MicroBatchFailed, blame
from streamrl.learner.quarantine import BadGroupsError, Quarantine
from streamrl.learner.trainer import Trainer
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.types import Batch, Group
from tests.operations_table import GOES_ON, documented

POISON = VOCABULARY + 7


class Source:
    """Notes what the service would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, tuple[int, int], str]] = []

    def quarantined(self, step: int, group: tuple[int, int], reason: str) -> None:
        self.told.append((step, group, reason))


class Run:
    """Rank 0 of a run in a folder; what it would tell the other ranks is in `commands`."""

    def __init__(self, trainer: Trainer, folder: Path, limit: int = 0) -> None:
        self.trainer, self.source, self.commands = trainer, Source(), list[str]()
        self.events = EventLog(event_path(folder, "learner"), "learner-0")
        self.quarantine = Quarantine(trainer, self.source, folder, self.events, limit)

    def step(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        sifted = self.quarantine.sift(batch, self.commands.append)
        metrics = self.trainer.train_step(sifted)
        self.quarantine.trained(batch.step)
        return sifted, metrics


@pytest.fixture
def run(trainer_of: Any, model_folder: Any, tmp_path: Path) -> Any:
    """`run(limit)`: a fresh learner in the same run folder."""
    config = make_config(model_folder(), tokens_per_micro_batch=256)
    return lambda limit=0: Run(trainer_of(config, tmp_path), tmp_path, limit)


def spoiled(batch: Batch, index: int, **fields: Any) -> Batch:
    """The batch with other fields in the last sample of one group."""
    group = batch.groups[index]
    sample = replace(group.samples[-1], **fields)
    return with_group(batch, index, replace(group, samples=(*group.samples[:-1], sample)))


def with_group(batch: Batch, index: int, group: Group) -> Batch:
    return replace(batch, groups=(*batch.groups[:index], group, *batch.groups[index + 1 :]))


def poisoned(batch: Batch, index: int = 1) -> Batch:
    output = batch.groups[index].samples[-1].output_ids
    return spoiled(batch, index, output_ids=np.full_like(output, POISON))


def test_a_token_out_of_the_vocabulary_costs_its_group_alone(run: Any, tmp_path: Path, caplog: Any) -> None:
    batch = make_batch()
    learner = run()
    sifted, _ = learner.step(poisoned(batch))
    after = weights(learner.trainer)
    assert sifted.quarantined == {1}
    assert [group.answered == () for group in sifted.groups] == [False, True, False]
    ((step, group, reason),) = learner.source.told
    assert (step, group) == (0, (1, 0))
    assert f"not below the vocabulary of {VOCABULARY}" in reason
    documented("group ... cannot be trained and is quarantined: ...; it is kept in ...", caplog.text, GOES_ON)
    kept = bad_batch.load(tmp_path / "quarantine" / "group_1_0.bin")
    assert kept.groups[0].samples[-1].output_ids[0] == POISON
    (event,) = [e for e in read_events(learner.events.path) if e["event"] == "learner.quarantined"]
    assert (event["group_id"], event["step"]) == (1, 0)
    delivered_again = with_group(replace(batch, quarantined=frozenset({1})), 1, batch.groups[1].emptied)
    again = run()
    again.step(delivered_again)
    assert again.source.told == []
    assert all((after[name] == tensor).all() for name, tensor in weights(again.trainer).items())


def test_a_group_for_which_the_disk_has_no_room_is_quarantined_all_the_same(run: Any, monkeypatch: Any, caplog: Any):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bad_batch, "write_whole", full)
    learner = run()
    sifted, _ = learner.step(poisoned(make_batch()))
    assert sifted.quarantined == {1}
    assert [(step, group) for step, group, _ in learner.source.told] == [(0, (1, 0))]
    assert "it could not be kept: [Errno 28] No space left on device" in caplog.text


def test_a_sample_longer_than_the_micro_batch_costs_its_group_alone(run: Any) -> None:
    sifted, metrics = run().step(spoiled(make_batch(), 2, prompt_ids=np.zeros(300, np.int32)))
    assert sifted.quarantined == {2}
    assert metrics["grad_norm"] > 0


def test_a_group_that_cannot_be_planned_costs_itself_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = run()
    plan = Trainer.plan

    def fails(self: Trainer, batch: Batch) -> None:
        if any(group.group_id == 0 and group.answered for group in batch.groups):
            raise IndexError("something that nobody has thought of")
        plan(self, batch)

    monkeypatch.setattr(Trainer, "plan", fails)
    sifted, _ = learner.step(make_batch())
    assert sifted.quarantined == {0}
    assert learner.source.told == [(0, (0, 0), "IndexError: something that nobody has thought of")]


def test_what_no_group_alone_brings_about_is_no_quarantine(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = run()
    plan = Trainer.plan

    def fails_as_a_whole(self: Trainer, batch: Batch) -> None:
        if len(batch.groups) > 1:
            raise ValueError("the step cannot be planned")
        plan(self, batch)

    monkeypatch.setattr(Trainer, "plan", fails_as_a_whole)
    with pytest.raises(ValueError, match="the step cannot be planned"):
        learner.step(make_batch())
    assert learner.source.told == []


def test_a_group_that_fails_in_a_ranks_hands_is_found_by_the_learners_after_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers tell nothing: the first learner ends, the second names the group, the third goes on."""
    from streamrl.learner.rows import RowMaker

    make = RowMaker.make

    def fails(self: RowMaker, micro: Any, longest: int) -> Any:
        if (1, 0) in micro.groups:
            raise IndexError("index out of range in self")
        return make(self, micro, longest)

    monkeypatch.setattr(RowMaker, "make", fails)
    with pytest.raises(MicroBatchFailed, match="a micro batch of groups"):
        run().step(make_batch())
    second = run()
    with pytest.raises(MicroBatchFailed, match="a micro batch of group 1: IndexError"):
        second.step(make_batch())
    assert second.commands == ["rehearse"]
    third = run()
    sifted, metrics = third.step(make_batch())
    assert (sifted.quarantined, third.commands) == ({1}, [])
    assert third.source.told == [(0, (1, 0), "index out of range in self")]
    assert metrics["grad_norm"] > 0
    assert not list((tmp_path / "quarantine").glob("blame*"))


def test_groups_that_fail_together_alone_are_left_out_together(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl.learner.rows import RowMaker

    make = RowMaker.make

    def fails(self: RowMaker, micro: Any, longest: int) -> Any:
        if {(0, 0), (1, 0)} <= set(micro.groups):
            raise ValueError("these two do not go together")
        return make(self, micro, longest)

    monkeypatch.setattr(RowMaker, "make", fails)
    for _ in range(2):
        with pytest.raises(MicroBatchFailed):
            run().step(make_batch())
    sifted, _ = run().step(make_batch())
    assert {0, 1} <= sifted.quarantined


def test_a_lost_peer_is_blamed_on_no_group(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.learner.rows import RowMaker

    def breaks(self: RowMaker, micro: Any, longest: int) -> Any:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(RowMaker, "make", breaks)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run().step(make_batch())
    assert not (tmp_path / "quarantine").exists()


def test_too_many_in_a_row_end_the_run_and_a_good_one_between_does_not(run: Any) -> None:
    learner = run(limit=3)
    bad = poisoned(poisoned(make_batch(), 1), 2)
    learner.step(bad)
    learner.step(replace(poisoned(make_batch(1), 1), step=1))
    with pytest.raises(BadGroupsError) as failed:
        learner.step(replace(poisoned(poisoned(poisoned(make_batch(2), 0), 1), 2), step=2))
    documented(
        "... groups in a row could not be trained (learner.bad_groups: ...); they are kept in ...", str(failed.value), 1
    )
    assert str(failed.value).startswith("3 groups in a row")


def test_a_step_of_which_nothing_is_left_is_made_without_an_update(run: Any) -> None:
    learner = run()
    learner.step(make_batch())  # from here on Adam has moments, by which it would move the weights
    before = weights(learner.trainer)
    sifted, metrics = learner.step(poisoned(poisoned(poisoned(make_batch(1), 0), 1), 2))
    assert len(sifted.quarantined) == 3
    assert learner.trainer.version.step == 2
    assert (metrics["steps/updates"], metrics["steps/skipped"]) == (1, 1)
    assert all((before[name] == tensor).all() for name, tensor in weights(learner.trainer).items())


def test_a_blame_of_groups_that_the_step_has_no_more_is_forgotten_and_no_rank_rehearses(
    run: Any, tmp_path: Path
) -> None:
    blame(tmp_path, 0, 1, MicroBatchFailed(((0, 1), (70, 0)), IndexError("of a former attempt, and of another group")))
    learner = run()
    sifted = learner.quarantine.sift(make_batch(), learner.commands.append)
    assert learner.commands == []
    assert sifted.quarantined == frozenset()
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_a_blame_is_written_whole(tmp_path: Path) -> None:
    import msgspec

    error = MicroBatchFailed(((3, 1), (4, 0)), IndexError("x"))
    error.__cause__ = IndexError("x")
    blame(tmp_path, 7, 2, error)
    (path,) = (tmp_path / "quarantine").iterdir()
    assert path.name == "blame_7_2.json"
    assert msgspec.json.decode(path.read_bytes(), type=Blame) == Blame(7, ((3, 1), (4, 0)), "x")
