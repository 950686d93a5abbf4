"""The parts of the simulation, each alone: a server, the drawn answers, the fits, the figures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.lab.simulate.calibration import (
    Observed,
    Served,
    Update,
    by_server,
    fit_server,
    learner_line,
    replayed,
    server_names,
)
from streamrl.lab.simulate.command import varied
from streamrl.lab.simulate.figures import Figures, figures, mean
from streamrl.lab.simulate.fit import least, positive_line
from streamrl.lab.simulate.model import NEIGHBOURS, Answers, Line, RecordedGroup
from streamrl.lab.simulate.server import Done, GenerationServer, ServerSpeed


def run_to_the_end(server: GenerationServer) -> list[Done]:
    done: list[Done] = []
    while math.isfinite(due := server.next_change):
        done += server.advance(due)
    return done


def test_a_lone_sample_takes_a_decoding_step_for_each_token_after_the_first() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.002))
    server.start(0, [50], 0.0)
    assert run_to_the_end(server)[0].time == pytest.approx(49 * 0.012)


def test_samples_at_once_share_the_step_and_pay_for_each() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.001))
    server.start(0, [10, 30], 0.0)
    assert run_to_the_end(server)[0].time == pytest.approx(9 * 0.012 + 20 * 0.011)


def test_what_halts_a_server_delays_all_that_runs() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, start=0.1, end=0.05, latency=7.0))
    server.start(0, [10], 0.0)
    server.advance(0.15)
    server.start(1, [100], 0.15)
    first, second = run_to_the_end(server)
    assert (first.group_id, second.group_id) == (0, 1)
    assert first.time == pytest.approx(0.1 + 9 * 0.01 + 0.1 + 0.05 + 7.0)
    assert second.time == pytest.approx(0.1 + 0.05 + 0.1 + 99 * 0.01 + 0.05 + 0.05 + 7.0)


def test_a_group_of_several_samples_is_prefilled_twice_and_what_comes_meanwhile_waits_for_the_next() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, prefill=0.1))
    server.start(0, [11, 11], 0.0)  # the common prompt until 0.1, the samples until 0.2
    server.advance(0.05)
    server.start(1, [11], 0.05)  # in the second one, too
    server.advance(0.15)
    server.start(2, [1, 1], 0.15)  # two of its own, which halt the others
    assert {each.group_id: pytest.approx(each.time) for each in run_to_the_end(server)} == {0: 0.5, 1: 0.5, 2: 0.4}


def test_an_update_prefills_what_runs_once_more() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, prefill=0.1, again=0.001))
    server.start(0, [11, 11], 0.0)
    server.advance(0.25)
    server.update(1, seconds=0.5)
    assert run_to_the_end(server)[0].time == pytest.approx(0.2 + 10 * 0.01 + 0.5 + 0.1 + 2 * 0.001)


def test_samples_beyond_the_limit_wait_for_a_place() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, max_running=1))
    server.start(0, [10, 10, 10], 0.0)
    assert server.samples == 3
    assert run_to_the_end(server)[0].time == pytest.approx(3 * 0.09)


def test_what_finds_no_place_halts_nobody_before_it_has_one() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, prefill=1.0, max_running=1))
    server.start(1, [10], now=0.0)
    assert server.advance(1.02) == []
    server.start(2, [5], now=1.02)
    first, second = server.advance(10.0)
    assert first.time == pytest.approx(1.0 + 9 * 0.01)
    assert second.time == pytest.approx(first.time + 1.0 + 4 * 0.01)


def test_an_update_stops_the_server_and_its_tokens_are_of_both_versions() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0, again=0.5), version=3)
    server.start(0, [10], 0.0)
    server.advance(0.035)
    server.update(4, seconds=2.0)
    done = run_to_the_end(server)
    assert done[0].spans == [[(3, 0, 4), (4, 4, 10)]]
    assert done[0].time == pytest.approx(0.09 + 2.0 + 0.5)


def test_a_server_is_busy_while_it_has_a_group() -> None:
    server = GenerationServer(ServerSpeed(step=0.01, sample=0.0))
    server.start(0, [10], 0.0)
    server.advance(5.0)
    server.start(1, [10], 5.0)
    assert server.busy(5.05) == pytest.approx(0.09 + 0.05)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5), min_size=1, max_size=12),
    gaps=st.lists(st.floats(0.0, 0.5), min_size=12, max_size=12),
    updates=st.lists(st.integers(0, 11), max_size=6),
    places=st.integers(1, 8),
)
def test_every_token_that_went_in_comes_out_once_with_a_version_that_never_falls(
    lengths: list[list[int]], gaps: list[float], updates: list[int], places: int
) -> None:
    server = GenerationServer(ServerSpeed(0.01, 0.003, 0.004, start=0.002, end=0.001, again=0.001, max_running=places))
    done, now = [], 0.0
    for group_id, group in enumerate(lengths):
        now += gaps[group_id]
        done += server.advance(now)
        for version in range(updates.count(group_id)):
            server.update(10 * group_id + version + 1, seconds=0.02)
        server.start(group_id, group, now)
    done += run_to_the_end(server)
    assert sorted(each.group_id for each in done) == list(range(len(lengths)))
    assert server.groups == server.samples == 0
    for each in done:
        for length, spans in zip(lengths[each.group_id], each.spans, strict=True):
            assert [begin for _, begin, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)]
            assert (spans[-1][2] if spans else 0) == length
            assert [version for version, _, _ in spans] == sorted({version for version, _, _ in spans})


def recorded(step: int, *lengths: int) -> RecordedGroup:
    return RecordedGroup(step, lengths, (1.0,) * len(lengths), (True,) * len(lengths))


def test_answers_are_drawn_from_groups_of_about_the_same_policy() -> None:
    answers = Answers(tuple(recorded(step, step, step) for step in range(1000)))
    rng = random.Random(0)
    for step in (0, 500, 999, 5000):
        steps = {answers.draw(rng, step, 2, longest=10**6).step for _ in range(100)}
        nearest = min(step, 999)
        assert max(abs(nearest - each) for each in steps) <= NEIGHBOURS


def test_a_group_of_another_size_is_drawn_from_one_recorded_group() -> None:
    answers = Answers((recorded(0, 3, 30, 300), recorded(0, 5, 50, 500)))
    rng = random.Random(0)
    for size in (1, 2, 3, 8):
        lengths = answers.draw(rng, 0, size, longest=100).lengths
        assert len(lengths) == size
        assert set(lengths) <= {3, 30, 100} or set(lengths) <= {5, 50, 100}


def test_a_drawn_answer_keeps_its_part_of_trained_tokens_also_where_it_is_cut() -> None:
    answers = Answers((RecordedGroup(0, (40, 100, 0), (1.0,) * 3, (True,) * 3, trained=(30, 20, 0)),))
    drawn = answers.draw(random.Random(0), 0, 3, longest=50)
    assert set(zip(drawn.lengths, drawn.trained, strict=True)) == {(40, 30), (50, 10), (0, 0)}
    whole = Answers((recorded(0, 40, 100),)).draw(random.Random(0), 0, 2, longest=50)
    assert whole.trained == whole.lengths


def test_a_worker_has_placed_each_group_on_the_server_with_the_fewest() -> None:
    spans = [(0, 9), (1, 3), (2, 9), (4, 5), (6, 9), (6, 7)]  # begin, end
    served = [Served(begin, end, (1,)) for begin, end in spans]
    found = by_server(served, ["server-0-0", "server-0-1"])
    assert {name: [group.begin for group in groups] for name, groups in found.items()} == {
        "server-0-0": [0, 2],
        "server-0-1": [1, 4, 6, 6],
    }
    updates = [Update(0.0, 1.0, 4, server=name) for name in ("server-0-2", "server-0-0")]
    assert server_names(3, updates) == ["server-0-0", "server-0-2", "without updates 0"]


def test_a_line_is_found_and_has_no_negative_part() -> None:
    assert positive_line([1, 2, 3], [12, 14, 16]) == pytest.approx((10, 2))
    assert positive_line([1, 2, 3], [1, 3, 5])[0] == 0
    assert positive_line([1, 2, 3], [3, 2, 1]) == (2, 0)
    assert positive_line([4, 4], [2, 2]) == (0, 0.5)
    assert positive_line([], []) == (0, 0)


def test_the_search_finds_the_least_of_a_function_of_positive_numbers() -> None:
    target = [0.003, 40.0, 1.5]
    found = least(lambda x: sum(math.log(a / b) ** 2 for a, b in zip(x, target, strict=True)), [1.0, 1.0, 1.0], 300)
    assert found == pytest.approx(target, rel=0.02)


def test_a_learners_line_follows_its_rows() -> None:
    rows = [
        {"tokens/trained": tokens, "time/step": 5.0 + 0.5 + tokens / 1000, "time/wait": 4.0, "time/publish": 1.0}
        for tokens in (1000, 2000, 4000)
    ]
    line = learner_line(rows)
    assert (line.fixed, line.each) == pytest.approx((0.5, 0.001))
    assert Line(line.fixed, line.each).draw(random.Random(0), 3000) == pytest.approx(3.5)


@pytest.mark.parametrize("places", [None, 8])
def test_a_server_is_recovered_from_what_it_did(places: int | None) -> None:
    truth, rng = ServerSpeed(0.01, 0.0005, start=0.002, end=0.001, latency=0.01), random.Random(1)
    begins = sorted(rng.uniform(0, 20) for _ in range(60))
    lengths = [tuple(max(1, round(rng.lognormvariate(3.0, 0.8))) for _ in range(4)) for _ in begins]
    updates = [Update(5.0, 0.3, 4, version=1), Update(12.0, 0.3, 4, version=2)]
    given = [Served(begin, begin, each) for begin, each in zip(begins, lengths, strict=True)]
    ends = replayed(truth, Observed(given, updates, places))
    served = [Served(each.begin, end, each.lengths, version) for each, (end, version) in zip(given, ends, strict=True)]
    found = fit_server([Observed(served, updates, places)], max_running=4096, interruption="in_place")
    for running in (4, 16 if places is None else places):  # as many as there were at once
        assert found.rate(running) == pytest.approx(truth.rate(running), rel=0.25)
    again = replayed(found, Observed(served, updates, places))
    assert sum(abs(a[0] - b[0]) for a, b in zip(again, ends, strict=True)) / len(ends) < 0.05


def test_figures_leave_the_warm_up_out_and_weigh_staleness_by_tokens() -> None:
    rows = [
        {
            "time": 10.0 * step, "time/step": 10.0, "time/wait": 5.0, "tokens/trained": 100 * (1 + (step == 5)),
            "tokens/generated": 200, "idle/generator": 0.25, "staleness/mean": float(step == 5),
            "staleness/p95": 1.0, "staleness/max": step,
        }
        for step in range(1, 6)
    ]  # fmt: skip
    found = figures(rows)
    assert (found.trained, found.generated) == (15.0, 20.0)
    assert (found.idle_learner, found.idle_generator) == (0.5, 0.25)
    assert (found.staleness_mean, found.staleness_max) == (pytest.approx(2 / 3), 5)
    with pytest.raises(ValueError, match="too few"):
        figures(rows[:4])


def test_figures_of_a_resumed_run_leave_out_the_time_it_was_down() -> None:
    def row(step: int, time: float, version: str) -> dict[str, float | str]:
        return {
            "time": time, "time/step": 10.0, "time/wait": 5.0, "tokens/trained": 100, "tokens/generated": 200,
            "idle/generator": 0.25, "staleness/mean": 1.0, "staleness/p95": 1.0, "staleness/max": 1,
            "version": f"{step}.{version}",
        }  # fmt: skip

    once = [row(step, 10.0 * step, "0") for step in range(1, 7)]
    again = [row(step, 10.0 * step + 3600, "1") for step in range(7, 10)]
    assert figures([*once, *again]) == figures(once)
    with pytest.raises(ValueError, match="too few"):
        figures([*once[:4], again[0], row(8, 9000.0, "2")])


def test_the_mean_of_runs_keeps_the_oldest_token_of_all() -> None:
    first, second = Figures(10, 20, 0.5, 0.1, 1.0, 2, 3), Figures(30, 40, 0.25, 0.3, 2.0, 4, 7)
    assert mean([first, second]) == Figures(20, 30, 0.375, pytest.approx(0.2), 1.5, 3, 7)


def test_varied_keys_give_every_combination() -> None:
    assert varied(["a=1,2", "b=3"]) == [("a=1", "b=3"), ("a=2", "b=3")]
    assert varied([]) == [()]
    with pytest.raises(ValueError, match="gives no values"):
        varied(["a"])
