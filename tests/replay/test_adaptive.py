"""The adaptive bound: where its controller moves it, why, and what it never does."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_parts import RUN, V0, make_config

from benchmarks.stored_sweeps import read_stored
from streamrl.config.replay import AdaptiveConfig
from streamrl.observe.events import EventLog, read_events
from streamrl.replay.adaptive import AdaptiveBound
from streamrl.replay.controllers.teaching import AGE, CLIPPED, ESS, MASKED, NOISE, SIGNAL, State, Teaching
from streamrl.replay.core import Core
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.orders.fifo import Fifo
from streamrl.replay.orders.windowed import Windowed
from streamrl.replay.records import Adapted
from streamrl.stream.messages import Hello, Progress
from streamrl.testing.controllers import ControllerConformance
from streamrl.types import PolicyVersion

P, S = 8, 16

Shown = Callable[[float], Mapping[str, float]]  # age -> signals


def bound_of(**keys: Any) -> AdaptiveBound:
    return AdaptiveBound(AdaptiveConfig(enabled=True, **keys), Fifo(P, (S + 1) * P), S)


def trained(bound: AdaptiveBound, steps: int, shown: Shown, noise: float = 0.0, first: int = 0) -> list[Adapted]:
    """Moves in a run whose learner is the slower side: tokens are as old as the bound in force at their issue allows.

    noise: standard deviation of the clipped share of a step.
    """
    chance, issued, moves = random.Random(first), [first] * (first + S + 1) * P, []
    for step in range(first, first + steps):
        issued += [step] * (step * P + bound.slots - len(issued))
        age = sum(step - version for version in issued[step * P : (step + 1) * P]) / P
        signals = {AGE: age, **shown(age)}
        signals[CLIPPED] = max(0.0, signals[CLIPPED] + chance.gauss(0.0, noise))
        if (move := bound.record(step + 1, signals)) is not None:
            moves.append(move)
    return moves


_LEVELS = [
    [statistics.fmean(run[figure] for run in point["runs"].values()) for figure in ("staleness", "clipped")]
    for point in read_stored()["staleness"]["points"]
    if point["series"] == "default"
]
_AGES, _SHARES = zip(*sorted(_LEVELS), strict=True)  # at bounds 0, 2, 8 and 16


def clipped_as_published(age: float) -> Mapping[str, float]:
    """docs/staleness.md, `default`: the measured shares; the effective sample size is high at any age."""
    return {CLIPPED: float(np.interp(age, _AGES, _SHARES)), MASKED: 0.0, ESS: 0.85}


def healthy(age: float) -> Mapping[str, float]:
    return {CLIPPED: 0.01, MASKED: 0.0, ESS: 0.95}


@pytest.mark.parametrize("first", [0, 100])  # from fresh weights on, whose first data is young; or in the midst of it
def test_a_policy_that_its_clip_pins_lowers_the_bound_to_about_2_while_its_effective_sample_size_stays_high(
    first: int,
) -> None:
    bound = bound_of()
    moves = trained(bound, 60, clipped_as_published, noise=0.02, first=first)
    assert all(move.reason.startswith("clipped ") for move in moves)
    assert moves[0].former == S
    assert moves[0].step <= first + 12
    assert 1 <= bound.staleness <= 3


def test_masked_tokens_and_small_effective_samples_lower_it_too() -> None:
    for worse, word in (({MASKED: 0.6}, "masked 0.6"), ({ESS: 0.3}, "ess 0.3")):
        bound = bound_of()
        (move,) = trained(bound, 20, lambda age, worse=worse: {**healthy(age), **worse}, first=100)
        assert word in move.reason
        assert "clipped" not in move.reason
        assert bound.staleness < S / 2


def test_what_teaches_raises_it_again_step_by_step_to_the_configured_bound() -> None:
    bound = bound_of(change=2.0)
    bound.restore(Adapted(step=0, former=16.0, staleness=2.0, reason=""))
    moves = trained(bound, 200, healthy)
    assert [move.staleness for move in moves] == [4, 6, 8, 10, 12, 14, 16]
    assert all(later.step - move.step >= move.former + 2 for move, later in pairwise(moves))


def test_a_controller_recalls_what_it_remembered_itself_and_nothing_of_another_one() -> None:
    bound = bound_of()
    remembered = {"step": 0, "former": 16.0, "staleness": 4.0, "reason": "", "memory": {"state": 0.3}}
    bound.restore(Adapted(**remembered, controller="of_my_own"))
    assert bound.staleness == 4
    with pytest.raises(ValueError, match="is not a valid State"):
        bound_of().restore(Adapted(**remembered, controller="teaching"))
    moves = trained(bound_of(), 400, lambda age: {**healthy(age), CLIPPED: 0.9 if age > 2 else 0.0})
    assert {move.controller for move in moves} == {"teaching"}


def test_data_that_the_bound_does_not_hold_back_does_not_raise_it() -> None:
    bound = bound_of()
    bound.restore(Adapted(step=0, former=16.0, staleness=4.0, reason=""))
    for step in range(1, 40):
        assert bound.record(step, {**healthy(0), AGE: 1.0}) is None


@pytest.mark.parametrize("share", [0.02, 0.115])
def test_noise_does_not_move_it(share: float) -> None:
    for seed in range(5):
        assert not trained(bound_of(), 300, lambda age: {**healthy(age), CLIPPED: share}, noise=0.03, first=seed)


def test_where_a_raise_is_one_too_many_it_comes_ever_later() -> None:
    def cliff(age: float) -> Mapping[str, float]:
        return {**healthy(age), CLIPPED: 0.3 if age > 5.5 else 0.02}

    moves = trained(bound_of(change=1.0), 600, cliff)
    falls = [move.step for move in moves if move.staleness < move.former]
    waits = [later - former for former, later in pairwise(falls)]
    assert len(falls) >= 3
    assert waits[-1] > 2 * waits[0]


def test_a_step_without_a_trained_token_is_no_measurement() -> None:
    import torch

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.diagnostics import before_updates, finish
    from streamrl.algo.losses import policy_loss
    from streamrl.config.algo import AlgoConfig
    from streamrl.learner.batch_metrics import batch_metrics
    from streamrl.testing.losses import token_batch
    from streamrl.types import Batch, Group, Sample

    tokens = token_batch()
    untrained = replace(tokens, mask=torch.zeros_like(tokens.mask))
    sums = policy_loss(untrained, AlgoConfig(), Denominators(tokens=0, rollouts=0))[1]
    groups = (Group(group_id=0, task="copy", prompt_index=0, samples=(Sample.placeholder(),)),)
    measured = batch_metrics(Batch(step=0, groups=groups)) | finish(sums) | before_updates([sums], ["clip_high"])
    signals = {name: measured[name] for name in Teaching.signals if math.isfinite(measured.get(name, math.nan))}
    assert signals == {}
    bound = bound_of()
    for step in range(1, 21):
        assert bound.record(step, {**healthy(0), AGE: 8.0}) is None
    assert bound.record(21, signals) is None
    assert trained(bound, 40, healthy, first=21) == []


def test_a_step_without_a_trained_token_is_no_reason_to_raise_it() -> None:
    def raises(empty: int) -> int:
        """The step of the first raise, where step `empty` measures nothing."""
        bound = bound_of()
        bound.restore(Adapted(step=0, former=16.0, staleness=2.0, reason=""))
        moves = (bound.record(step, {} if step == empty else {**healthy(2), AGE: 2.0}) for step in range(1, 40))
        return next(move.step for move in moves if move is not None)

    due = raises(empty=0)
    assert raises(empty=due) > due


def test_noise_of_the_gradient_tips_what_is_between_the_limits_and_nothing_else() -> None:
    between, noisy = {CLIPPED: 0.1}, {SIGNAL: 0.01, NOISE: 1.0}
    assert not trained(bound_of(), 60, lambda age: {**healthy(age), **between})
    assert not trained(bound_of(), 60, lambda age: {**healthy(age), **between, SIGNAL: 0.5, NOISE: 1.0})
    assert not trained(bound_of(), 60, lambda age: {**healthy(age), **noisy})
    moves = trained(bound_of(), 20, lambda age: {**healthy(age), **between, **noisy}, first=100)
    assert "clipped 0.1 (range 0.08..0.15), gradient signal to noise 0.01 below 0.05" in moves[0].reason


def test_a_service_that_was_started_again_goes_on_with_what_it_knew() -> None:
    former = bound_of()
    (move, *_) = trained(former, 30, clipped_as_published, first=100)
    again = bound_of()
    again.restore(move)
    assert (again.staleness, again.slots) == (former.staleness, former.slots)
    controller = again._controller
    assert isinstance(controller, Teaching)
    assert controller.state is State.FALLING
    assert controller.memory() == move.memory
    assert again.record(move.step, {CLIPPED: 0.9}) is None  # it was judged before


def test_a_move_is_an_event_and_outlives_the_service(tmp_path: Path) -> None:
    config = make_config(replay={"adaptive": {"enabled": True, "patience": 1}})
    events = EventLog(tmp_path / "events" / "replay-0.jsonl", "replay-0")
    durable = DurableBuffer(config, tmp_path, events)
    core = Core(config, durable, lambda *_: True, events, 0.0)
    learner = Hello(run=RUN, role="learner", name="learner-0", version=V0)
    for message in (learner, Progress(version=PolicyVersion(1), signals={CLIPPED: 0.4, AGE: 1.0})):
        core.handle_message(b"learner", message, 0.0)
    (moved,) = [record for record in read_events(events.path) if record["event"] == "bound.moved"]
    assert (moved["step"], moved["former"], moved["staleness"]) == (1, 1.0, 0.089)
    assert moved["reason"].startswith("clipped 0.4 ")
    durable.commit(0.0)
    durable.close()
    for _ in range(2):  # from the record, then from the snapshot of the next segment
        again = DurableBuffer(config, tmp_path, events)
        assert again.buffer.selection_metrics()["staleness/admitted"] == pytest.approx(0.0894, abs=1e-4)
        again.close()


def test_moves_are_told_once_with_their_reasons() -> None:
    bound = bound_of(patience=1)
    assert (bound.reason(), bound.metrics()) == ("", {"staleness/admitted": 16.0})
    bound.record(1, {ESS: 0.1, AGE: 16.0})
    assert bound.reason() == "16 -> 1.55: ess 0.1 (range 0.5..0.8) at staleness 16"
    assert bound.reason() == ""


def test_it_is_off_unless_it_is_asked_for() -> None:
    bound = AdaptiveBound(AdaptiveConfig(), Fifo(4, 12), 2.0)
    for step in range(20):
        assert bound.record(step, {ESS: 0.01}) is None
    assert (bound.slots, bound.metrics()) == (12, {})
    assert AdaptiveConfig().signals == ()


TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once
TestTeaching = type("TestTeaching", (ControllerConformance,), {"name": "teaching", **TOGETHER})


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.dictionaries(st.sampled_from(Teaching.signals), st.floats(-1, 20)), max_size=40),
    groups=st.integers(1, 6),
    highest=st.sampled_from([0, 0.5, 1, 2.25, 3]),
    data=st.data(),
)
def test_it_never_leaves_what_is_configured_and_never_deadlocks(
    steps: list[dict[str, float]], groups: int, highest: float, data: st.DataObject
) -> None:
    slots = math.floor((highest + 1) * groups)
    window = data.draw(st.integers(1, slots - groups + 1))
    order = Windowed(groups, slots - (window - 1), window)
    every = data.draw(st.integers(1, order.capacity // groups))
    bound = AdaptiveBound(AdaptiveConfig(enabled=True, patience=1, change=0.7), order, highest, every)
    for step, signals in enumerate(steps):
        bound.record(step, signals)
        assert every * groups <= bound.slots <= order.capacity
        assert 0 <= bound.staleness <= highest
