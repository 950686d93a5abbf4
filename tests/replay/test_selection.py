"""Filters and the audit of selection."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from replay_schedule import answer, placeholder

from streamrl.config.replay import FilterConfig
from streamrl.replay.selection import Audit, measure, reason_to_drop
from streamrl.types import Group, PolicyVersion, Ticket

TICKET = Ticket(group_id=0, task="copy", prompt_index=0, seed=1, issued_version=PolicyVersion(0), deadline=1.0)


def group_of(*rewards: float, failed: int = 0) -> Group:
    group = answer(TICKET, PolicyVersion(0), rewards)
    missing = placeholder(TICKET).samples[:1] * failed
    return Group(group_id=0, task="copy", prompt_index=0, samples=(*group.samples, *missing))


@pytest.mark.parametrize(
    ("filters", "group", "reason"),
    [
        ({}, group_of(1, 1), None),
        ({"signal": True}, group_of(0.5, 0.5), "no signal"),
        ({"signal": True}, group_of(0, 1, failed=1), None),
        ({"signal": True}, group_of(1, failed=1), "no signal"),
        ({"placeholders": True}, group_of(0, 1, failed=2), "2 failed samples"),
        ({"min_pass_rate": 0.25}, group_of(1, 0, 0, 0), None),
        ({"min_pass_rate": 0.3}, group_of(1, 0, 0, 0), r"pass rate 0.25 is below 0.3"),
        ({"max_pass_rate": 0.7}, group_of(1, 1, 1, 0), r"pass rate 0.75 is above 0.7"),
        ({"max_pass_rate": 0.7}, group_of(1, 0, failed=2), None),  # of the answered ones
    ],
)
def test_a_filter_drops_a_group_for_a_reason(filters: dict[str, object], group: Group, reason: str | None) -> None:
    assert reason_to_drop(group, measure(group, size=1), FilterConfig.model_validate(filters)) == reason


def test_the_audit_sets_generated_dropped_and_trained_groups_side_by_side() -> None:
    audit = Audit()
    kept, dropped = measure(group_of(1, 0), 1), measure(group_of(1, 1, failed=1), 1)
    for record in (kept, dropped):
        audit.generated.add(record)
    audit.dropped.add(dropped)
    metrics = audit.collect()
    assert metrics["selection/generated/groups"] == 2
    assert metrics["selection/generated/pass_rate"] == 0.75
    assert metrics["selection/dropped/pass_rate"] == 1.0
    assert metrics["selection/dropped/length"] == 1.0  # tokens of an answer; a placeholder is none
    assert metrics["selection/trained/groups"] == 0
    assert "selection/trained/length" not in metrics
    assert metrics["selection/late_duplicates"] == 0


def test_what_is_measured_is_what_the_group_says() -> None:
    group = group_of(1, 0, 1, failed=1)
    record = measure(group, size=7)
    assert (record.tokens, record.answers, record.size, record.oldest) == (group.tokens, 3, 7, 0)
    assert record.pass_rate == group.pass_rate
    assert measure(placeholder(TICKET), 1).oldest is None


def test_of_a_rollout_of_several_branches_the_last_one_counts() -> None:
    group = group_of(1, 1, 0, 0, 1, failed=1)  # rollouts of 2, 2 and 1 samples, and one that failed
    branched = replace(group, branches=(2, 2, 1, 1))
    branched.check()
    record = measure(branched, size=1)
    assert (record.tokens, record.answers, record.pass_rate) == (group.tokens, 3, 2 / 3)
    assert (branched.size, branched.pass_rate, branched.has_signal) == (4, 2 / 3, True)
    assert reason_to_drop(branched, record, FilterConfig(placeholders=True)) == "1 failed samples"
    assert len(branched.emptied.samples) == 4
    alike = replace(group_of(0, 1, 0.5, 1), branches=(2, 2))
    assert reason_to_drop(alike, measure(alike, size=1), FilterConfig(signal=True)) == "no signal"
