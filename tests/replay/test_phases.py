"""The phases of a run: every order of words, failures, signals and deadlines, and the exit code that follows."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.machine import IllegalTransition
from streamrl.replay.phases import Phase, Phases
from streamrl.types import PolicyVersion

PUBLISH, EVALUATION, STOP = 10.0, 30.0, 5.0
FINAL = PolicyVersion(3)


def phases() -> Phases:
    return Phases(PUBLISH, EVALUATION, STOP)


def finishing() -> Phases:
    run = phases()
    run.finished(FINAL, 0.0)
    return run


def stopping() -> Phases:
    run = finishing()
    run.complete(1.0)
    return run


def test_a_run_ends_with_0_when_everybody_has_left_or_the_time_for_it_is_over():
    assert not stopping().is_over(1.0 + STOP - 0.1, anyone=True)
    assert stopping().is_over(1.0 + STOP, anyone=True)
    assert stopping().is_over(1.0, anyone=False)
    assert stopping().code == 0


def test_the_last_version_is_waited_for_until_publish_timeout_and_its_evaluation_longer():
    run = finishing()
    assert run.is_published(1.0, everywhere=True, evaluating=False)
    assert not run.is_published(PUBLISH - 0.1, everywhere=False, evaluating=False)
    assert run.is_published(PUBLISH, everywhere=False, evaluating=False)
    assert not run.is_published(PUBLISH + EVALUATION - 0.1, everywhere=True, evaluating=True)
    assert run.is_published(PUBLISH + EVALUATION, everywhere=False, evaluating=True)


def test_a_learner_that_begins_again_takes_the_end_back():
    run = finishing()
    run.learner_began()
    assert (run.phase, run.final, run.goes_on) == (Phase.SERVING, None, True)
    run.finished(FINAL, 100.0)
    assert not run.is_published(100.0 + PUBLISH - 0.1, everywhere=False, evaluating=False)


@pytest.mark.parametrize("begin", [phases, finishing, stopping])
def test_a_failure_ends_the_run_with_1_and_waits_for_nobody(begin):
    run = begin()
    run.fail()
    run.fail()  # a second role gives it up
    assert run.has_failed
    assert run.is_over(0.0, anyone=True)
    assert run.code == 1


@pytest.mark.parametrize("code", [0, 130])
@pytest.mark.parametrize("begin", [phases, finishing, stopping])
def test_a_signal_ends_the_service_at_once_with_its_code(begin, code: int):
    run = begin()
    run.interrupt(code)
    assert run.is_over(0.0, anyone=True)
    assert (run.code, run.has_failed) == (code, False)


def test_a_learner_that_says_again_that_it_has_finished_does_not_hold_the_end():
    run = stopping()
    run.finished(FINAL, 5.0)
    assert (run.phase, run.is_over(1.0 + STOP, anyone=True)) == (Phase.STOPPING, True)


def test_an_exit_ends_the_run_with_0_and_waits_for_everybody():
    run = phases()
    run.exited(1.0)
    assert (run.code, run.has_failed, run.goes_on) == (0, False, False)
    assert not run.is_over(1.0 + STOP - 0.1, anyone=True)
    assert run.is_over(1.0 + STOP, anyone=True)


def test_what_cannot_happen_is_refused():
    with pytest.raises(IllegalTransition, match="COMPLETE is not possible in SERVING"):
        phases().complete(0.0)
    with pytest.raises(IllegalTransition, match="LEARNER_BEGAN is not possible in STOPPING"):
        stopping().learner_began()


class Machine(RuleBasedStateMachine):
    """A run, driven as the service drives it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.run = phases()
        self.anyone = True
        self.finished_at: float | None = None
        self.expected: int | None = None  # exit code that is decided
        self.stopped_at: float | None = None

    going_on = precondition(lambda self: self.run.goes_on)
    alive = precondition(lambda self: self.run.phase is not Phase.ENDED)

    @rule(seconds=st.sampled_from([0.1, 3.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @going_on
    @rule()
    def learner_begins(self) -> None:
        self.run.learner_began()
        self.finished_at = None

    @alive
    @rule()
    def learner_finishes(self) -> None:
        if self.run.goes_on:
            self.finished_at = self.now
        self.run.finished(FINAL, self.now)

    @precondition(lambda self: self.run.phase is Phase.SERVING)
    @rule()
    def learner_exits(self) -> None:
        self.run.exited(self.now)
        self.expected, self.stopped_at = 0, self.now

    @alive
    @rule()
    def a_role_gives_up(self) -> None:
        self.run.fail()
        self.expected, self.stopped_at = 1, float("-inf")

    @alive
    @rule(code=st.sampled_from([0, 130]))
    def a_signal_comes(self, code: int) -> None:
        self.run.interrupt(code)
        self.expected = code

    @rule(anyone=st.booleans())
    def workers_come_and_go(self, anyone: bool) -> None:
        self.anyone = anyone

    @rule(everywhere=st.booleans(), evaluating=st.booleans())
    def ticks(self, everywhere: bool, evaluating: bool) -> None:
        if self.run.phase is not Phase.FINISHING:
            return
        assert self.finished_at is not None
        waited = self.now - self.finished_at
        published = self.run.is_published(self.now, everywhere=everywhere, evaluating=evaluating)
        late = waited >= PUBLISH + (EVALUATION if evaluating else 0.0)
        assert published == (late or (everywhere and not evaluating))
        if published:
            self.run.complete(self.now)
            self.expected, self.stopped_at = 0, self.now

    @rule()
    def turns(self) -> None:
        over = self.run.is_over(self.now, anyone=self.anyone)
        assert over == (self.run.phase is Phase.ENDED)
        assert over <= (self.expected is not None)
        if self.run.phase is Phase.STOPPING:
            assert self.anyone
            assert self.stopped_at is not None
            assert self.now < self.stopped_at + STOP

    @invariant()
    def the_phase_is_what_was_said(self) -> None:
        assert self.run.goes_on == (self.expected is None)
        assert (self.run.phase is Phase.FINISHING) == (self.run.goes_on and self.finished_at is not None)
        assert self.run.has_failed == (self.expected == 1)
        assert self.expected is None or self.run.code == self.expected
        assert (self.run.phase is Phase.FINISHING) <= (self.run.final == FINAL)


TestMachine = Machine.TestCase
