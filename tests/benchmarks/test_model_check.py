"""The model check: a hundred schedules hold, and it finds what it is there to find."""

from __future__ import annotations

import pytest

from benchmarks.model_check import check
from streamrl.replay.orders.base import Order
from streamrl.replay.state import State

SEARCHED = 100  # schedules in which a fault of the code must show


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (25, 50, 75))])
def test_a_hundred_schedules_keep_every_promise(first: int) -> None:
    findings = [check(seed) for seed in range(first, first + 25)]
    assert [finding for finding in findings if finding.problem] == []
    assert sum(finding.counts.get("service", 0) for finding in findings) > 10
    assert sum(finding.counts.get("trained again", 0) for finding in findings) > 10


def first_problem() -> str:
    return next((problem for seed in range(SEARCHED) if (problem := check(seed).problem)), "nothing was found")


def test_a_ticket_that_may_be_out_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Order.required_step
    monkeypatch.setattr(Order, "required_step", lambda *arguments: max(0, real(*arguments) - 1))
    assert ", the bound is " in first_problem()


def test_a_learner_whose_ledger_is_not_believed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "_contradicts", lambda *_: False)
    monkeypatch.setattr(State, "_settle", lambda *_: None)
    assert first_problem() != "nothing was found"
