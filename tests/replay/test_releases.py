"""When tickets go out: the policies, what the gate makes of them, and runs in which they are held back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.stateful import run_state_machine_as_test
from replay_schedule import Schedule
from test_reuse import ReuseSchedule

from streamrl.choices import Options
from streamrl.config import Config
from streamrl.config.replay import ReplayConfig
from streamrl.replay import release_gate
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.lives import NEVER
from streamrl.replay.records import Consumed
from streamrl.replay.release_gate import ReleaseGate
from streamrl.replay.releases.base import EARLIEST, Release
from streamrl.replay.releases.just_in_time import KEPT_GROUPS, LEAST_GROUPS, JustInTime, Timing
from streamrl.replay.shares import Shares
from streamrl.replay.state import State
from streamrl.testing.releases import ReleaseConformance
from streamrl.types import PolicyVersion

SCHEDULES = settings(
    max_examples=25,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
FIRST_FAILURE = settings(SCHEDULES, phases=[HypothesisPhase.generate], report_multiple_bugs=False)


class TestEager(ReleaseConformance):
    name = "eager"


class TestJustInTime(ReleaseConformance):
    name = "just_in_time"
    settings: ClassVar[dict[str, Any]] = {"release_options": {"quantile": 0.5}}


def policy(groups: int = 1, quantile: float = 0.9, margin: float = 0.0) -> JustInTime:
    release = JustInTime(groups, Timing(quantile=quantile, margin=margin))
    for seconds in range(100):
        release.completed(float(seconds))
    return release


# -- the policy


def test_no_lead_time_is_known_until_enough_groups_are_measured() -> None:
    release = JustInTime(8, Timing())
    for _ in range(LEAST_GROUPS - 1):
        release.completed(1.0)
    assert release.lead((), 1.0) is None
    assert release.metrics() == {}
    release.completed(1.0)
    assert release.lead((), 1.0) == 1 + Timing().margin


def test_the_quantile_is_that_of_whole_steps() -> None:
    assert policy(groups=1).lead((), 1.0) == 93  # of the last 64: 36 to 99
    assert (
        policy(groups=8).lead((), 1.0) == 87
    )  # the slowest of twelve steps: 7, 15, ... 95; four groups have no step yet


def test_a_moment_in_which_all_groups_are_slow_is_one_step_and_not_many_groups() -> None:
    release = JustInTime(8, Timing(margin=0.0))
    for step in range(20):
        for _ in range(8):
            release.completed(30.0 if step == 14 else 1.0)
    assert release.lead((), 1.0) == 1.0
    scattered = JustInTime(8, Timing(margin=0.0))
    for group in range(160):
        scattered.completed(30.0 if group % 20 == 4 else 1.0)
    assert scattered.lead((), 1.0) == 30.0  # as many, in five of twelve steps


@pytest.mark.parametrize(("stuck", "lead"), [(8, 1.0), (16, 40.0)])
def test_groups_that_are_out_together_count_as_the_fewest_steps_that_have_them(stuck: int, lead: float) -> None:
    release = JustInTime(8, Timing(margin=0.0))
    for _ in range(8 * 14):
        release.completed(1.0)
    assert release.lead((40.0,) * stuck, 1.0) == lead


def test_margin_and_rounds_lengthen_the_lead() -> None:
    assert policy(margin=0.5).lead((), 1.0) == pytest.approx(1.5 * 93)
    assert policy().lead((), 3.0) == pytest.approx(93 + 2 * 67.5)


@pytest.mark.parametrize(
    ("open_for", "lead"),
    [((93.0, 50.0), 93), ((95.0,), 94), ((500.0,) * 5, 98), ((500.0,) * 7, 99), ((500.0, 300.0, *(200.0,) * 10), 200)],
)
def test_a_straggler_counts_before_it_is_back(open_for: tuple[float, ...], lead: float) -> None:
    assert policy().lead(open_for, 1.0) == lead


def test_what_was_long_ago_does_not_count() -> None:
    release = policy()
    for _ in range(KEPT_GROUPS):
        release.completed(7.0)
    assert release.lead((), 1.0) == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [({"quantile": 1.0}, "quantile"), ({"margin": -1}, "margin"), ({"quantil": 0.5}, "replay.release_options.quantil")],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplayConfig.model_validate({"release": "just_in_time", "release_options": options})


# -- the gate


class Fixed(Release):
    """The same lead time always."""

    seconds: float | None = 10.0

    def lead(self, open_for: Iterable[float], rounds: float) -> float | None:
        return self.seconds


def gate(seconds: float | None, acknowledged: int = 5) -> tuple[ReleaseGate, State]:
    """Of steps of two groups, 4 s each; the learner has got step 5 at 20 s, and asks for step 6 at 24 s."""
    state, release = State(Shares({"copy": 1}, 2)), Fixed(2, Options())
    release.seconds = seconds
    gate = ReleaseGate(release, state, publish_every=1)
    gate.began(0, {})
    for step in range(6):
        gate.tick(4.0 * step)
        gate.asked(step)
        gate.delivered(step)
        state.next_step, state.below = step + 1, 2 * (step + 1)
    state.acknowledged, state.next_id = PolicyVersion(acknowledged), 12
    return gate, state


@pytest.mark.parametrize(
    ("lead", "now", "step", "due"),
    [
        (0.0, 20.0, 7, 24.0),  # no weights can be newer for step 6
        (10.0, 20.0, 8, 22.0),
        (10.0, 21.9, 8, 22.0),
        (10.0, 22.0, 9, NEVER),
        (10.0, 30.0, 9, NEVER),  # the learner is late
        (EARLIEST, 20.0, NEVER, NEVER),
        (math.nan, 20.0, 7, 24.0),
        (-5.0, 20.0, 7, 24.0),
    ],
)
def test_a_ticket_goes_out_its_lead_time_before_its_step_is_asked_for(
    lead: float, now: float, step: float, due: float
) -> None:
    held, _ = gate(lead)
    held.tick(now)
    assert (held.limit, held.due_at) == (2 * step, pytest.approx(due))


@pytest.mark.parametrize(
    ("capacity", "begun", "limit"),
    [
        (None, False, 6),  # no worker is known
        (3, False, 8),
        (5, False, 10),
        (5, True, 12),
        (0, True, 8),
    ],
)
def test_a_run_starts_with_the_steps_that_its_workers_generate_at_once_and_two_more(
    capacity: int | None, begun: bool, limit: float
) -> None:
    state = State(Shares({"copy": 1}, 2))
    slow = ReleaseGate(Fixed(2, Options()), state, publish_every=1)
    state.acknowledged = PolicyVersion(0)
    if begun:  # the first batch is there: step 1 is wanted next
        slow.began(0, {})
        slow.tick(1.0, capacity)
        slow.asked(0)
        slow.delivered(0)
    slow.tick(2.0, capacity)
    assert slow.limit == limit
    slow.tick(3.0, 0)  # all workers are away for a moment
    assert slow.limit == limit


def test_a_policy_that_does_not_know_yet_starts_slowly_too_however_long_the_learner_is_measured() -> None:
    held, _ = gate(None)
    held.tick(20.0, 6)
    assert held.limit == 2 * (6 + 3 + 2)
    assert "release/lead" not in held.metrics(99)


def test_what_the_learner_asks_for_is_never_held_back() -> None:
    held, state = gate(0.0, acknowledged=2)
    held.tick(20.0)
    assert held.limit == 12
    held.asked(6)
    assert held.due_at < 20.0  # the service looks again at once
    state.lives.add(12, "copy", 0)
    held.tick(24.0)
    assert held.limit == 14
    del state.lives[12]
    state.next_id = 14  # all of them are back, and the order wants more
    held.tick(24.0)
    assert held.limit == 16


def test_a_publish_interval_leaves_the_steps_before_it_free() -> None:
    held, _ = gate(0.0)
    held._every = 3
    held.tick(20.0)
    assert held.limit == 2 * (5 + 3 + 1)


def test_a_step_is_as_many_groups_as_the_last_steps_had_new_ones() -> None:
    held, _ = gate(10.0)  # at step 6, groups below 12 are settled
    for step in range(1, 5):  # of four groups, of which three, two, three and two are new
        reused = (1,) if step % 2 else (1, 2)
        held.record(Consumed(step=step, group_ids=(1, 2, 3, 4), reused=reused))
    held.tick(20.0)
    assert held.limit == 12 + math.ceil(2 * 2.5)
    held.tick(22.0)
    assert held.limit == 12 + math.ceil(3 * 2.5)


def test_steps_that_are_delivered_again_come_first() -> None:
    held, _ = gate(10.0)
    held.began(2, {})
    held.tick(30.0)
    assert held.limit == 2 * 7  # step 6 is wanted in 16 s, and nothing newer comes before it


def test_groups_that_a_learner_leaves_behind_are_no_stragglers() -> None:
    buffer = buffer_of("just_in_time")
    for _ in range(4):
        assert buffer.issue("a", PolicyVersion(0), 0.0) is not None
    buffer.begin(PolicyVersion(3, 1))  # weights that know of none
    assert buffer.gate._opened == {}


def buffer_of(release: str, **replay: Any) -> Buffer:
    keys = {"groups_per_step": 2, "max_staleness": 9, "release": release, **replay}
    buffer = make_buffer(Config.model_validate({"run": {"steps": 99}, "replay": keys}))
    buffer.begin(PolicyVersion(0))
    buffer.acknowledge(PolicyVersion(0))
    return buffer


# -- every schedule


class Whims(Release):
    """Mostly as late as can be."""

    asked = 0

    def lead(self, open_for: Iterable[float], rounds: float) -> float | None:
        self.asked += 1
        return (0.0, 0.0, math.nan, 2.5, 0.0, -1.0, EARLIEST, None)[self.asked % 8]


def wider(config: Config) -> Config:
    """The same age for what is trained again."""
    replay = config.replay
    more = {"release": f"{__name__}:Whims", "max_staleness": replay.max_staleness + 2}
    more["reuse_max_age"] = replay.reuse_bound if replay.reuse > 1 else None
    return config.model_copy(update={"replay": replay.model_copy(update=more)})


class HeldBack(Schedule):
    """Every step takes a second, tickets are held back by whims, and the bound is wide enough for that."""

    held: ClassVar[int] = 0

    @staticmethod
    def make(config: Config) -> Buffer:
        return make_buffer(wider(config))

    def train(self) -> bool:
        trained = super().train()
        self.now += float(trained)
        return trained

    def issue_all(self, worker: str) -> None:
        super().issue_all(worker)
        gate = self.buffer.gate
        if self.buffer.required is None:
            limit, gate.limit = gate.limit, NEVER
            type(self).held += self.buffer.required is not None
            gate.limit = limit


def test_no_whim_of_a_policy_breaks_the_bound_or_the_order_or_stops_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_gate, "STEPS", 1)
    run_state_machine_as_test(HeldBack, settings=SCHEDULES)
    assert HeldBack.held > 20


class HeldBackReuse(HeldBack, ReuseSchedule):
    """Groups are trained again, too."""

    @property
    def audited(self) -> Config:
        return wider(self.config)


def test_no_whim_breaks_what_is_promised_of_groups_that_are_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_gate, "STEPS", 1)
    held = HeldBack.held
    run_state_machine_as_test(HeldBackReuse, settings=SCHEDULES)
    assert HeldBackReuse.held - held > 20


def test_a_gate_that_does_not_look_at_the_learner_stops_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_gate, "STEPS", 1)
    monkeypatch.setattr(ReleaseGate, "asked", lambda self, step: None)
    monkeypatch.setattr(ReleaseGate, "_decide", lambda self, now: 0)
    with pytest.raises(AssertionError, match="does not go on"):
        run_state_machine_as_test(HeldBack, settings=FIRST_FAILURE)
