"""When an update is refused, when a run ends for want of updates, what it leaves, and who is slow."""

from __future__ import annotations

import math

import pytest
from learner_parts import make_batch

from streamrl.config.learner import OptimizerSettings
from streamrl.learner import bad_batch
from streamrl.learner.safety import BadStepsError, UpdateGuard
from streamrl.learner.stragglers import SlowestRank
from tests.operations_table import documented


def guard(bad_steps: int = 0, **settings) -> UpdateGuard:
    return UpdateGuard(OptimizerSettings(**settings), bad_steps)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, math.nan), (0.0, math.inf)])
def test_what_is_not_finite_is_refused(loss, norm):
    assert guard().judge(loss, norm) == "not finite"


def test_a_norm_far_above_the_recent_median_is_a_spike():
    judge = guard(spike_factor=3, spike_window=8).judge
    assert [judge(0, norm) for norm in (1.0, 2.0, 1.5, 1.5, 4.4, 4.6)] == ["ok"] * 5 + ["spike"]


def test_too_few_norms_make_no_median():
    judge = guard(spike_factor=2, spike_window=8).judge
    assert [judge(0, norm) for norm in (1.0, 100.0, 1.0, 100.0)] == ["ok"] * 4


def test_batches_without_a_signal_do_not_pull_the_median_to_zero():
    judge = guard(spike_factor=2, spike_window=4).judge
    assert [judge(0, norm) for norm in (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.1)] == ["ok"] * 7


def test_a_level_that_has_risen_for_good_is_accepted_after_half_a_window():
    judge = guard(spike_factor=3, spike_window=8).judge
    for _ in range(8):
        judge(0, 1.0)
    verdicts = [judge(0, 10.0) for _ in range(8)]
    assert verdicts == ["spike"] * 4 + ["ok"] * 4


def test_without_a_factor_nothing_is_a_spike():
    judge = guard().judge
    assert {judge(0, norm) for norm in [1.0] * 40 + [1e6]} == {"ok"}


def test_the_run_ends_after_so_many_steps_in_a_row_without_an_update_and_says_why():
    watched = guard(bad_steps=3, spike_factor=2, spike_window=4)
    for norm in (1.0, 1.0, math.nan, 9.0):
        watched.judge(0, norm)
        watched.end_step()
    watched.judge(0, math.inf)
    text = r"3 steps in a row .*learner.bad_steps: 3.*: 2 not finite, 1 spike; the last gradient norm was inf"
    with pytest.raises(BadStepsError, match=text) as failed:
        watched.end_step()
    documented("... steps in a row made no update (learner.bad_steps: ...); refused updates: ...", str(failed.value), 1)


def test_one_update_of_a_step_makes_it_a_good_one():
    watched = guard(bad_steps=2)
    for norms in ((math.nan,), (math.nan, 1.0), (math.nan,)):
        for norm in norms:
            watched.judge(0, norm)
        watched.end_step()


def test_an_update_without_a_token_is_neither_a_bad_one_nor_the_end_of_bad_ones():
    watched = guard(bad_steps=3, spike_factor=2, spike_window=4)
    for norm in (math.nan, None, math.nan, None, None):
        assert watched.judge(0, norm or 0.0, empty=norm is None) == ("empty" if norm is None else "not finite")
        watched.end_step()
    assert watched.judge(math.nan, math.nan, empty=True) == "empty"
    watched.judge(0, math.nan)
    with pytest.raises(BadStepsError, match=r"3 steps in a row .*: 3 not finite; the last gradient norm was nan"):
        watched.end_step()


def test_zero_bad_steps_never_ends_a_run():
    watched = guard(bad_steps=0)
    for _ in range(50):
        watched.judge(math.nan, 0)
        watched.end_step()


def test_a_resumed_guard_goes_on_where_it_was():
    first, second = guard(bad_steps=2, spike_factor=2, spike_window=4), guard(2, spike_factor=2, spike_window=4)
    for norm in (1.0, 1.2, math.nan):
        first.judge(0, norm)
        first.end_step()
    second.load_state_dict(first.state_dict())
    assert second.judge(0, 9.0) == first.judge(0, 9.0) == "spike"
    for watched in (first, second):
        with pytest.raises(BadStepsError, match="1 not finite, 1 spike"):
            watched.end_step()


def test_a_bad_batch_comes_back_from_its_file(tmp_path):
    batch = make_batch(step=7)
    path = bad_batch.save(batch, tmp_path / "bad_batch_7.bin")
    again = bad_batch.load(path)
    assert (again.step, [group.group_id for group in again.groups]) == (7, [0, 1, 2])
    for ours, theirs in zip(again.samples, batch.samples, strict=True):
        assert ours.output_ids.tolist() == theirs.output_ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
        assert (ours.spans, ours.reward) == (theirs.spans, theirs.reward)


def test_a_bad_batch_that_is_half_written_has_not_its_name(tmp_path, monkeypatch):
    def no_space(handle):
        assert list(tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        bad_batch.save(make_batch(step=7), tmp_path / "bad_batch_7.bin")
    assert not list(tmp_path.glob("bad_batch_*"))


def test_a_rank_is_named_when_it_stays_the_slowest_for_some_steps():
    slowest = SlowestRank()
    assert slowest.observe([1.0, 1.0, 1.8]) == (1.8, None)
    assert slowest.observe([1.0, 1.0, 1.8]) == (1.8, None)
    assert slowest.observe([1.0, 1.0, 1.8]) == (1.8, 2)
    assert slowest.observe([1.0, 1.0, 1.8]) == (1.8, None)  # not at every step


def test_ranks_that_take_turns_at_being_slow_are_not_named():
    slowest = SlowestRank()
    times = ([2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]) * 3
    assert {slowest.observe(seconds)[1] for seconds in times} == {None}


def test_a_step_without_a_straggler_restarts_the_count():
    slowest = SlowestRank()
    slow, even = [1.0, 1.0, 2.0], [1.0, 1.0, 1.2]
    assert [slowest.observe(seconds)[1] for seconds in (slow, slow, even, slow, slow, slow)] == [None] * 5 + [2]
