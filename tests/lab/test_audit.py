"""What the audit finds in the batches of a run, for every order and after restarts."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.history import History
from streamrl.lab.audit.reuse import Sizes
from streamrl.learner.batch_metrics import batch_metrics
from streamrl.observe.limits import LIMITS, limits_of
from streamrl.replay.orders import make_order
from streamrl.replay.records import Began, Consumed, Lost, Measured
from streamrl.types import Batch, Group, PolicyVersion

P = 2


def config_of(**replay) -> Config:
    journal = {"keep": replay.pop("keep", "all")}
    task = replay.pop("task", {})
    return Config.model_validate(
        {"replay": {"groups_per_step": P, "max_staleness": 2, **replay}, "journal": journal, "task": task}
    )


@pytest.fixture
def check(make_group):
    """`check(config, [(step, [group or id, ...], [id that is marked as reused, ...]), ...], versions)`: the findings of
    a history.
    """

    def group_of(given: int | Group, step: int) -> Group:
        return given if isinstance(given, Group) else make_group(given, version=PolicyVersion(max(0, step - 1)))

    def run(
        config: Config, history: list, versions: dict[int, str] | None = None, reached: int | None = None
    ) -> Findings:
        findings = Findings(bound=make_order(config.replay).worst_staleness)
        checked = History(config, versions or {})
        for step, groups, *reused in history:
            batch = Batch(step=step, groups=tuple(group_of(group, step) for group in groups), reused=frozenset(*reused))
            checked.check(batch, findings, handed_out=step == reached)
        return findings

    return run


def test_strict_order_passes_and_another_is_told(check):
    assert check(config_of(), [(0, [0, 1]), (1, [2, 3])]).problems == []
    (problem,) = check(config_of(), [(0, [0, 1]), (1, [3, 2])]).problems
    assert problem == "step 1 trained group 3 before group 2, which fifo with window 1 does not allow"


def test_a_window_may_pass_a_straggler_as_far_as_it_reaches(check):
    config = config_of(order="windowed", window=3)
    assert check(config, [(0, [1, 2]), (1, [0, 3])]).problems == []
    (problem,) = check(config, [(0, [1, 3]), (1, [0, 2])]).problems
    assert problem == "step 0 trained group 3 before group 0, which windowed with window 3 does not allow"


def test_completion_order_may_be_any_but_trains_no_group_twice(check):
    config = config_of(order="ready")
    assert check(config, [(0, [5, 3]), (1, [0, 9])]).problems == []
    (problem,) = check(config, [(0, [5, 3]), (1, [0, 5])]).problems
    assert problem == "step 1 trained group 5 a second time"


def test_an_answer_of_which_nothing_is_trained_has_no_staleness_as_in_the_metrics(check, make_group):
    first, second = make_group(2, version=PolicyVersion(1)), make_group(3, version=PolicyVersion(1))
    masked = replace(
        second.samples[0],
        loss_mask=np.zeros_like(second.samples[0].loss_mask),
        spans=tuple(replace(span, version=PolicyVersion(0)) for span in second.samples[0].spans),
    )
    second = replace(second, samples=(masked, *second.samples[1:]), arena=None)
    found = check(config_of(), [(0, [0, 1]), (1, [first, second])])
    batch = Batch(step=1, groups=(first, second))
    assert (found.problems, found.staleness) == ([], batch_metrics(batch)["staleness/max"]) == ([], 0)


def test_a_group_may_be_trained_again_as_often_and_as_late_as_is_configured(check, make_group):
    config = config_of(reuse=2)
    old = [make_group(group_id, version=PolicyVersion(0)) for group_id in range(4)]
    found = check(config, [(0, old[:2]), (1, [2, old[0]]), (2, [3, old[1]])])
    assert (found.problems, found.reused, found.groups, found.staleness) == ([], 2, 6, 2)
    for history, problem in (
        ([(0, old[:2]), (1, [2, old[0]]), (2, [3, old[0]])], "step 2 trained group 0 a third time; replay.reuse=2"),
        ([(0, [old[0]] * 2)], "step 0 trained group 0 twice in one batch"),
        ([(0, old[:2]), (1, old[:2])], "step 1 trained 2 groups that an earlier step had; replay.reuse_share=0.5"),
        (
            [(0, old[:2]), (1, [2, replace(old[0], attempt=1)])],
            "step 1 trained attempt 1 of group 0, which was trained as attempt 0 before",
        ),
    ):
        assert check(config, history).problems == [problem]
    late = [(0, old[:2]), (1, [2, 3]), (2, [4, 5]), (3, [6, old[0]])]
    assert check(config, late).problems == ["step 3 trained tokens 3 steps old; the bound is 2"]
    assert check(config_of(reuse=2, reuse_max_age=3), late).problems == []


def consumed(step: int, *group_ids: int, reused: tuple[int, ...] = ()) -> Consumed:
    return Consumed(step=step, group_ids=group_ids, reused=reused)


AGAIN = consumed(1, 2, 0, reused=(0,))
BACK = Began(version=PolicyVersion(0, 1), next_step=0)

SIZES = {
    "large enough": ([consumed(0, 0, 1), Measured(step=0, ess=(0.5, 0.4)), AGAIN], []),
    "too small": (
        [consumed(0, 0, 1), Measured(step=0, ess=(0.4, 0.5)), AGAIN],
        ["step 1 trained group 0 again, effective sample size 0.4"],
    ),
    "not told": ([consumed(0, 0, 1), AGAIN], ["step 1 trained group 0 again, effective sample size None"]),
    "nothing learned": (
        [consumed(0, 0, 1), Measured(step=0, ess=(None, 0.5)), AGAIN],
        ["step 1 trained group 0 again, effective sample size None"],
    ),
    "told of the use before": (
        [consumed(0, 0, 1), Measured(step=0, ess=(0.9, 0.9)), AGAIN, consumed(2, 3, 0, reused=(0,))],
        ["step 2 trained group 0 again, effective sample size None"],
    ),
    "told too late": (
        [consumed(0, 0, 1), AGAIN, Measured(step=0, ess=(0.9, 0.9)), consumed(2, 3, 0, reused=(0,))],
        [f"step {step} trained group 0 again, effective sample size None" for step in (1, 2)],
    ),
    "without its mark": (
        [consumed(0, 0, 1), Measured(step=0, ess=(0.4, 0.9)), consumed(1, 2, 0)],
        [
            "step 1 trained group 0 again, effective sample size 0.4",
            "step 1 trained 1 groups that an earlier step had, its record names 0",
        ],
    ),
    "marked and new": (
        [consumed(0, 0, 1), consumed(1, 2, 3, reused=(2,))],
        ["step 1 trained 0 groups that an earlier step had, its record names 1"],
    ),
    "put together again": ([consumed(0, 0, 1), Lost(step=0, group_ids=(1,)), consumed(0, 0, 1)], []),
    "measured before a learner went back": (
        [consumed(0, 0, 1), Measured(step=0, ess=(0.9, 0.9)), BACK, consumed(0, 0, 1), AGAIN],
        ["step 1 trained group 0 again, effective sample size None"],
    ),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_use_again_without_an_effective_sample_size_that_is_large_enough_is_told(case):
    records, problems = SIZES[case]
    sizes = Sizes(config_of(reuse=3, reuse_min_ess=0.5).replay)
    assert [problem for record in records for problem in sizes.add(record)] == problems


def test_a_journal_that_begins_in_the_middle_may_mark_what_it_does_not_know():
    sizes = Sizes(config_of(reuse=2).replay, whole=False)
    assert list(sizes.add(consumed(4, 9, 3, reused=(3,)))) == []
    assert len(list(sizes.add(consumed(5, 10, 9)))) == 2


def test_a_step_that_is_missing_or_incomplete_is_told(check):
    assert check(config_of(order="ready"), [(0, [0, 1]), (2, [2])]).problems == [
        "batch of step 2 where step 1 was due",
        "step 2 trained 1 groups",
    ]


def test_a_prompt_is_trained_once_but_those_of_two_tasks_have_their_own_numbers(check, make_group):
    mix = {"task": {"mix": [{"name": "copy"}, {"name": "successor"}]}}
    twice = replace(make_group(1), prompt_index=0)
    other = replace(twice, task="successor")
    assert check(config_of(**mix), [(0, [0, other])]).problems == []
    assert check(config_of(), [(0, [0, twice])]).problems == [
        "step 0 trained prompt 0 of copy a second time, in group 1"
    ]
    assert "is none of the run" in check(config_of(), [(0, [0, other])]).problems[0]


def test_a_token_beyond_the_bound_is_told_unless_the_order_passes_it_on(check, make_group):
    old = [(step, [2 * step, 2 * step + 1]) for step in range(3)]
    old.append((3, [6, make_group(7, version=PolicyVersion(0))]))
    findings = check(config_of(), old)
    assert findings.problems == ["step 3 trained tokens 3 steps old; the bound is 2"]
    passed = check(config_of(order="ready", over_age="pass"), old)
    assert (passed.problems, passed.staleness, passed.bound) == ([], 3, None)


def test_tokens_newer_than_their_step_come_from_a_former_incarnation_only(check, make_group):
    ahead = make_group(1, version=PolicyVersion(4, incarnation=0))
    assert check(config_of(), [(0, [0, ahead])], {0: "1.1"}).problems == []
    (problem,) = check(config_of(), [(0, [0, ahead])], {0: "1.0"}).problems
    assert problem == "step 0 trained tokens of version 4.0, which it came before"


def test_a_journal_that_keeps_what_a_resume_needs_is_checked_from_where_it_begins(check):
    findings = check(config_of(keep="resume"), [(7, [14, 15]), (8, [16, 17])])
    assert (findings.problems, findings.first, findings.batches) == ([], 7, 2)
    assert check(config_of(), [(7, [14, 15])]).problems[0] == "batch of step 7 where step 0 was due"


def test_a_group_that_was_trained_before_the_journal_begins_counts_as_trained_again(check, make_group):
    config, old = config_of(keep="resume", reuse=2, reuse_max_age=3), make_group(9, version=PolicyVersion(4))
    found = check(config, [(7, [14, old], [9]), (8, [16, 14], [14])])
    assert (found.problems, found.first, found.reused, found.uses) == ([], 7, 2, 2)
    assert (
        check(config, [(7, [14, old], [9]), (8, [16, old], [9])]).problems
        == [
            "step 8 trained tokens 4 steps old; the bound is 3",
            "step 8 trained group 9 a third time; replay.reuse=2",
        ][::-1]
    )
    assert check(config, [(7, [14, old])]).problems == ["step 7 trained tokens 3 steps old; the bound is 2"]
    whole = [(0, [0, 1]), (1, [2, make_group(3, version=PolicyVersion(0))], [3])]
    assert check(config_of(reuse=2), whole).reused == 0  # a mark alone makes no use


def test_uses_in_batches_that_are_gone_count_by_their_records():
    sizes = Sizes(config_of(reuse=2).replay, whole=False)
    told = Measured(step=3, ess=(1.0, 1.0)), Measured(step=4, ess=(1.0, 1.0))
    records = [consumed(3, 6, 1, reused=(1,)), told[0], consumed(4, 8, 6, reused=(6,)), told[1]]
    assert [problem for record in records for problem in sizes.add(record)] == []
    assert list(sizes.add(consumed(5, 10, 6, reused=(6,)))) == ["step 5 trained group 6 a third time; replay.reuse=2"]
    assert list(sizes.add(consumed(5, 10, 1, reused=(1,)))) == ["step 5 trained group 1 a third time; replay.reuse=2"]


def test_a_batch_that_was_handed_out_when_the_run_was_ended_is_checked_but_counts_as_untrained(check):
    findings = check(config_of(), [(0, [0, 1]), (1, [2, 3])], reached=1)
    assert (findings.problems, findings.handed_out, findings.batches, findings.groups) == ([], 1, 1, 2)
    assert "a second time" in check(config_of(), [(0, [0, 1]), (1, [2, 0])], reached=1).problems[0]
    assert (
        "of step 2 where step 1 was due"
        in check(config_of(), [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])], reached=1).problems[0]
    )


def test_quantised_servers_have_limits_of_their_own_wider_than_those_of_their_weights_dtype():
    trees = (
        {},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"dtype": "bfloat16"}, "generate": {"quantization": "fp8"}},
    )
    plain, half, quantised = (limits_of(Config.model_validate(tree)) for tree in trees)
    assert (plain, half, quantised) == (LIMITS["float32"], LIMITS["bfloat16"], LIMITS["fp8"])
    for name in ("largest", "p99", "mean"):
        assert getattr(plain, name) < getattr(half, name) < getattr(quantised, name)
