"""What the metrics of a run say is wrong with it: each trouble is told once as it begins and once as it ends."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import file as config_file
from streamrl.observe import hints
from streamrl.observe.hints import FRESH, RULES, WINDOW, Hint, Hints, hints_of
from streamrl.observe.metrics import is_known
from tests.operations_table import GOES_ON, documented
from tests.test_docs import ROOT, anchors

QUICKSTART = Path(__file__).parent / "quickstart_columns.json"
LONG = 3 * WINDOW

WELL = {
    "signal_rate": 0.6,
    "pass_rate": 0.4,
    "loss/entropy": 1.0,
    FRESH: 0.001,
    "length/cut": 0.05,
    "loss/clip_low": 0.01,
    "loss/clip_high": 0.01,
    "reward/failed_share": 0.0,
    "offpolicy/ess": 0.95,
    "idle/learner": 0.4,
    "idle/generator": 0.1,
}


LOW = WELL | {"loss/entropy": 0.01, "reward/mean": 0.6, "reward/std": 0.3}


def course(*stretches: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The rows of a run that is well but for these, LONG steps each."""
    metrics = [WELL | changed for changed in stretches for _ in range(LONG)]
    return [{"step": step, **row} for step, row in enumerate(metrics, 1)]


def told(name: str, **changed: float) -> str:
    """The line of a hint that begins with such rows; asserts that it is the only one, and ends behind them."""
    trouble = {key.replace("__", "/"): value for key, value in changed.items()}
    run = Hints(course({}, trouble, {}))
    assert [hint.rule.name for hint in run.all] == [name]
    (begun, first), (ended, last) = run.lines
    assert LONG < begun <= 2 * LONG < ended <= 3 * LONG
    assert first.startswith(f"hint at step {begun}: ")
    assert last == f"hint over at step {ended}: {run.all[0].text}"
    assert run.active == []
    return first


def test_a_run_that_is_well_is_told_nothing() -> None:
    assert hints_of(course({}, {}, {})) == []


def test_a_recorded_quickstart_is_told_nothing() -> None:
    columns = json.loads(QUICKSTART.read_text())  # of configs/quickstart.yaml, on two cores that had other work as well
    assert columns.keys() >= WELL.keys()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert [row["step"] for row in rows] == list(range(1, 151))
    assert hints_of(rows) == []


def test_groups_without_signal_are_told_and_why() -> None:
    easy = told("no_signal", signal_rate=0.0, pass_rate=1.0)
    documented("...% of the groups had signal in ... steps: every answer is right...", easy, GOES_ON)
    hard = told("no_signal", signal_rate=0.01, pass_rate=0.0)
    documented("no answer is right, the task is too hard...", hard, GOES_ON)
    split = told("no_signal", signal_rate=0.0, pass_rate=0.5)
    documented("the answers to a prompt are all right or all wrong...", split, GOES_ON)


def test_groups_without_signal_are_no_matter_where_a_teacher_or_a_kl_in_the_reward_trains_them() -> None:
    for metric in ("distillation/kl", "reward/kl"):
        assert hints_of(course({}, {"signal_rate": 0.0, metric: 0.3})) == []


def test_an_entropy_that_collapses_is_told_but_not_that_of_a_solved_task() -> None:
    documented("the entropy has collapsed: ...", told("entropy", loss__entropy=0.01), GOES_ON)
    assert hints_of(course({}, {"loss/entropy": 0.01, "pass_rate": 0.95})) == []
    rising = [row | {"reward/mean": row["step"] / 100, "reward/std": 0.3} for row in course({}, {"loss/entropy": 0.01})]
    assert hints_of(rising) == []
    flat = [{"step": 99 + index, **LOW} for index in range(2 * WINDOW)]
    assert [hint.rule.name for hint in hints_of([*rising, *flat])] == ["entropy"]


def test_engines_that_drift_apart_are_told_but_not_what_they_always_had() -> None:
    line = told("mismatch", **{FRESH.replace("/", "__"): 0.06})
    documented("servers and learner differ by ... nats a token...", line, GOES_ON)
    always = [row | {FRESH: 0.08} for row in course({}, {})]
    assert hints_of(always) == []
    assert [hint.rule.name for hint in hints_of([row | {FRESH: 0.2} for row in always])] == ["mismatch"]


def test_a_server_that_computes_otherwise_or_has_other_weights_is_told() -> None:
    far = told("engines", mismatch__mean=0.02, mismatch__limit=0.01)
    documented("a server is ... nats a token from the learner with the same weights...", far, GOES_ON)
    assert hints_of(course({}, {"mismatch/mean": 0.008, "mismatch/limit": 0.01})) == []
    none = told("engines", mismatch__infinite=0.002, mismatch__limit=0.01)
    assert "of 0.2% of the tokens" in none
    documented("of ...% of the tokens a server, or the learner, has a log-prob that is no number", none, GOES_ON)
    other = told("other_weights", mismatch__slope=1.0, mismatch__slope_error=0.05)
    documented("a server is ...% of the way to the weights before those that it reports...", other, GOES_ON)
    assert hints_of(course({}, {"mismatch/slope": 0.55, "mismatch/slope_error": 0.05})) == []
    known = course({}, {"mismatch/slope": 0.8, "mismatch/slope_error": 0.05})
    unknown = [
        row | ({"mismatch/slope": 0.1, "mismatch/slope_error": 1.0} if row["step"] % 5 == 0 else {}) for row in known
    ]
    assert [hint.rule.name for hint in hints_of(unknown)] == ["other_weights"]


@pytest.mark.parametrize("every", [1, 4, 9])
def test_what_is_measured_once_a_version_is_judged_over_as_many_versions(every: int) -> None:
    for name, metrics in (
        ("mismatch", {FRESH: 0.06}),
        ("engines", {"mismatch/mean": 0.02, "mismatch/limit": 0.01}),
        ("other_weights", {"mismatch/slope": 1.0, "mismatch/slope_error": 0.05}),
    ):
        well = {key: (0.001 if key in (FRESH, "mismatch/mean", "mismatch/slope") else metrics[key]) for key in metrics}
        stretches = [metrics if stretch == 1 else well for stretch in range(3) for _ in range(20 * every)]
        rows = [
            {"step": step, **WELL, **({FRESH: None} if step % every else {}), **({} if step % every else measured)}
            for step, measured in enumerate(stretches, 1)
        ]
        told_at, over_at = (step for step, _ in Hints(rows).lines)
        assert [hint.rule.name for hint in hints_of(rows)] == [name]
        assert 20 * every < told_at <= 40 * every < over_at


def test_what_nobody_measures_any_more_is_no_trouble_any_more() -> None:
    trouble = {"mismatch/slope": 1.0, "mismatch/slope_error": 0.05}
    assert [hint.end is not None for hint in hints_of(course({}, trouble, {}))] == [True]


def test_answers_that_are_cut_are_told_unless_the_model_learns_to_end_them() -> None:
    documented("...% of the answers are cut at the length limit...", told("cut", length__cut=0.5), GOES_ON)
    falling = [row | {"length/cut": 0.9 * 0.95 ** row["step"]} for row in course({}, {})]
    assert hints_of(falling) == []


def test_clipped_tokens_failing_scorers_and_few_effective_samples_are_told() -> None:
    documented("...% of the tokens are clipped...", told("clipped", loss__clip_low=0.15, loss__clip_high=0.1), GOES_ON)
    documented("the scorer failed on ...% of the answers...", told("unscored", reward__failed_share=0.1), GOES_ON)
    documented("the effective sample size is ...", told("off_policy", offpolicy__ess=0.3), GOES_ON)


def test_an_adaptive_bound_that_fell_is_told_with_its_reason() -> None:
    rows = course({hints.ADMITTED: 16.0}, {hints.ADMITTED: 2.0}, {hints.ADMITTED: 16.0})
    rows[LONG] |= {"staleness/reason": "16 -> 2: clipped 0.3"}
    (begun, first), (ended, _) = Hints(rows).lines
    documented("the adaptive bound admits ... of ... steps of staleness...", first, GOES_ON)
    assert "of 16 steps of staleness (16 -> 2: clipped 0.3)" in first
    assert LONG < begun < 2 * LONG < ended


def test_the_side_that_waits_is_told_but_not_two_that_take_turns() -> None:
    learner = told("learner_bound", idle__generator=0.6, idle__learner=0.0)
    documented("the generators wait for the learner ...% of the time; try ...", learner, GOES_ON)
    generators = told("generator_bound", idle__learner=0.97)
    documented("the learner waits for the generators ...% of the time; try ...", generators, GOES_ON)
    assert hints_of(course({"idle/generator": 0.6, "idle/learner": 0.97})) == []


def test_a_figure_between_the_two_thresholds_neither_begins_nor_ends_a_hint() -> None:
    between = {"offpolicy/ess": sum(hints.ESS) / 2}
    assert hints_of(course({}, between)) == []
    assert len(Hints(course({}, {"offpolicy/ess": 0.1}, between)).lines) == 1


def test_what_a_run_does_not_measure_is_not_judged() -> None:
    assert hints_of([{"step": step} for step in range(1, LONG)]) == []
    for name in WELL:
        assert hints_of(course({name: None}, {name: math.nan})) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_hint_names_keys_that_there_are_and_a_section_that_there_is(rule: hints.Rule) -> None:
    page, _, anchor = rule.link.partition("#")
    assert anchor in anchors(ROOT / page)
    assert set(rule.keys) <= {path for path, _ in config_file.fields()}
    assert rule.link in Hint(rule, "so", begin=1).line


def test_what_is_judged_are_metrics_of_the_table() -> None:
    assert all(map(is_known, WELL))
    assert {rule.name for rule in RULES} == {rule.judge.__name__.removeprefix("_") for rule in RULES}


FIGURES = st.one_of(st.none(), st.just(math.nan), st.floats(0, 1), st.floats(allow_infinity=True))
ROWS = st.lists(st.dictionaries(st.sampled_from(sorted(WELL)), FIGURES), max_size=60)


@settings(max_examples=60)
@given(ROWS)
def test_whatever_a_run_writes_each_hint_begins_before_it_ends_and_begins_again_only_then(
    figures: list[dict[str, float | None]],
) -> None:
    rows = [{"step": step, **row} for step, row in enumerate(figures, 1)]
    run = Hints(rows)
    for rule in RULES:
        spans = [(hint.begin, hint.end) for hint in run.all if hint.rule is rule]
        assert all(end is not None and begin < end for begin, end in spans[:-1])
        assert all(one[1] is not None and one[1] < other[0] for one, other in itertools.pairwise(spans))
    assert len(run.lines) == 2 * len(run.all) - len(run.active)


def test_rows_that_are_followed_are_taken_once_and_all_again_after_a_resume() -> None:
    rows = course({}, {"offpolicy/ess": 0.1})
    run = Hints()
    for count in (5, 5, LONG, 2 * LONG, 2 * LONG):
        run.follow(rows[:count])
    assert run.lines == Hints(rows).lines != []
    resumed = [*rows[: LONG + 1], *({"step": row["step"], **WELL} for row in rows[LONG + 1 :])]
    run.follow(resumed)
    assert run.lines == []
