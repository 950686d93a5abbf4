"""The whole circle in simulated time, against what must hold for any of its parts."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.lab.simulate.circle import Circle
from streamrl.lab.simulate.figures import at_ends, between, figures, staleness
from streamrl.lab.simulate.fleet import plan, read_fleet
from streamrl.lab.simulate.model import Answers, Line, Model, RecordedGroup
from streamrl.lab.simulate.server import ServerSpeed
from streamrl.learner.batch_metrics import batch_metrics
from streamrl.types import Batch

SPEED = ServerSpeed(step=0.01, sample=0.0005)
FREE = Line(0.0, 0.0)


def answers(*lengths: int, groups: int = 50) -> Answers:
    """Groups of four samples whose lengths go round."""
    places = [tuple(lengths[(group + sample) % len(lengths)] for sample in range(4)) for group in range(groups)]
    return Answers(tuple(RecordedGroup(0, place, (1.0, 0.0, 1.0, 0.0), (True, False) * 2) for place in places))


def model(speed: ServerSpeed = SPEED, learner: Line = FREE, update: Line = FREE, **parts: Any) -> Model:
    return Model(answers(4, 9, 30, 70, 16), speed, learner, update, **parts)


def config(steps: int = 20, workers: int = 1, **replay: Any) -> Config:
    publish, in_flight = {"every": replay.pop("every", 1)}, replay.pop("in_flight", 8)
    if (at_once := replay.pop("at_once", 1)) > 1:
        publish |= {"transport": "memory", "at_once": at_once}
    placement = replay.pop("placement", "separate")
    publish |= {"interruption": replay.pop("interruption", "retract")}
    generate = {
        "group_size": 4, "groups_in_flight": in_flight, "workers": workers, "servers": replay.pop("servers", 1)
    }  # fmt: skip
    return Config.model_validate(
        {
            "run": {"steps": steps, "placement": placement},
            "generate": generate | {"sampling": {"max_new_tokens": 100}},
            "replay": {"groups_per_step": 4, **replay},
            "publish": publish,
        }
    )


def test_an_infinitely_fast_learner_leaves_generations_own_rate() -> None:
    rows = Circle(config(steps=60, max_staleness=4, in_flight=4), model(SPEED)).run()
    found = figures(rows)
    assert found.idle_generator == pytest.approx(0.0, abs=0.02)
    assert found.idle_learner == pytest.approx(1.0)
    assert SPEED.rate(4) < found.trained < SPEED.rate(16) * 1.1
    assert found.trained == pytest.approx(found.generated, rel=0.05)


def test_a_fast_learner_trains_nearly_twice_the_tokens_where_groups_are_trained_twice() -> None:
    once, twice = (
        figures(Circle(config(steps=60, max_staleness=4, in_flight=4, reuse=reuse), model(SPEED)).run())
        for reuse in (1, 2)
    )
    assert twice.trained == pytest.approx(2 * twice.generated, rel=0.05)
    assert twice.trained > 1.6 * once.trained
    assert twice.staleness_max <= 4


def test_an_infinitely_fast_server_leaves_the_learners_own_rate() -> None:
    found = figures(
        Circle(config(max_staleness=2, release="eager"), model(ServerSpeed(1e-9, 0.0), Line(0.0, 0.001))).run()
    )
    assert found.trained == pytest.approx(1000, rel=0.01)
    assert found.idle_learner == pytest.approx(0.0, abs=0.01)
    assert found.staleness_mean == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize(
    ("learner", "replay", "oldest"),
    [
        (Line(2.0, 0.0, (0.8, 1.2)), {}, 3.0),  # the learner is the slow side
        (Line(2.0, 0.0), {"order": "windowed", "window": 5}, 3.0),
        (Line(2.0, 0.0), {"order": "ready"}, 3.0),
        (Line(2.0, 0.0), {"every": 3}, 4.0),
        (Line(0.4, 0.0, (0.8, 1.2)), {}, 16.0),  # both sides take as long
        (Line(0.05, 0.0), {}, 16.0),  # generation is the slow side
    ],
)
def test_tickets_just_in_time_make_data_younger_at_the_same_speed(
    learner: Line, replay: dict[str, Any], oldest: float
) -> None:
    """Speed is the share of time in which the learner works: steps/s, less the chance of which lengths were drawn."""
    parts = Model(answers(4, 9, 30, 70, 16), ServerSpeed(0.01, 0.0001), learner, Line(0.05, 0.0))
    eager, just_in_time = (
        [
            figures(Circle(config(60, release=release, max_staleness=16, **replay), parts, seed).run()[20:])
            for seed in range(4)
        ]
        for release in ("eager", "just_in_time")
    )
    works = [fmean(1 - each.idle_learner for each in found) for found in (eager, just_in_time)]
    ages = [fmean(each.staleness_mean for each in found) for found in (eager, just_in_time)]
    assert works[1] > 0.97 * works[0]
    assert ages[1] < oldest
    assert ages[1] <= ages[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_bound_up_to_one_leaves_nothing_to_hold_back(staleness: int) -> None:
    parts = model(learner=Line(0.4, 0.0), update=Line(0.05, 0.0))
    eager, just_in_time = (
        Circle(config(30, max_staleness=staleness, release=release), parts).run()
        for release in ("eager", "just_in_time")
    )
    assert eager == just_in_time


@pytest.mark.parametrize("groups_per_step", [1, 2, 4])
def test_the_steps_between_the_ends_begin_when_tickets_come_just_in_time(groups_per_step: int) -> None:
    parts = Model(answers(4, 9, 30, 70, 16), ServerSpeed(0.01, 0.0001), Line(2.0, 0.0, (0.8, 1.2)), Line(0.05, 0.0))
    keys = config(80, workers=4, max_staleness=16, groups_per_step=groups_per_step)
    rows = Circle(keys, parts).run()
    counted = between(rows, keys)
    assert len(counted) == 80 - at_ends(keys) > 0
    assert max(row["staleness/max"] for row in counted) <= 3
    assert max(row["staleness/mean"] for row in rows) > 9  # those of the slow start


def test_by_sample_tickets_come_just_in_time_too() -> None:
    keys = config(60, release="just_in_time", max_staleness=16)
    generate = keys.generate.model_copy(update={"submission": "sample", "requests_in_flight": 32})
    circle = Circle(keys.model_copy(update={"generate": generate}), model(learner=Line(2.0, 0.0)))
    assert figures(circle.run()[20:]).staleness_mean < 3.0
    assert figures(circle.rows[20:]).idle_learner < 0.03


def test_synchronous_steps_take_the_sum_of_both_and_have_no_staleness() -> None:
    parts = Model(answers(51), ServerSpeed(0.01, 0.0), Line(1.0, 0.0), Line(0.25, 0.0))
    rows = Circle(config(steps=10, max_staleness=0), parts).run()
    assert figures(rows).staleness_max == 0
    assert rows[-1]["time"] - rows[-2]["time"] == pytest.approx(0.5 + 1.0 + 0.25)


def test_asynchronous_steps_take_the_longer_of_both() -> None:
    parts = Model(answers(51), ServerSpeed(0.01, 0.0), Line(1.0, 0.0), FREE)
    rows = Circle(config(steps=30, max_staleness=1), parts).run()
    assert rows[-1]["time"] - rows[-2]["time"] == pytest.approx(1.0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_on_shared_devices_every_step_takes_the_sum_of_both(staleness: int) -> None:
    parts = Model(answers(51), ServerSpeed(0.01, 0.0), Line(1.0, 0.0), Line(0.25, 0.0))
    circle = Circle(config(steps=10, max_staleness=staleness, placement="shared", in_flight=4), parts)
    rows = circle.run()
    assert rows[-1]["time"] - rows[-2]["time"] == pytest.approx(0.5 + 1.0 + 0.25)
    assert figures(rows).idle_generator == pytest.approx(1.25 / 1.75, rel=0.05)


def test_two_servers_generate_twice_as_fast_where_generation_is_the_limit() -> None:
    one, two = (
        figures(Circle(config(40, workers, max_staleness=8, in_flight=4), model(learner=Line(1e-3, 0.0))).run())
        for workers in (1, 2)
    )
    assert two.trained / one.trained == pytest.approx(2.0, rel=0.1)


def test_the_same_seed_gives_the_same_rows_and_another_one_does_not() -> None:
    first, again, other = (Circle(config(max_staleness=2), model(), seed).run() for seed in (1, 1, 2))
    assert first == again != other


def test_staleness_is_counted_as_the_learner_counts_it() -> None:
    circle = Circle(config(12, max_staleness=4), model(learner=Line(0.3, 0.0)))
    circle.run()
    for step in range(4):
        batch = Batch(step=step + 3, groups=tuple(circle.groups[4 * step : 4 * step + 4]))
        counted, expected = staleness(batch), batch_metrics(batch)
        assert counted == pytest.approx({name: expected[name] for name in counted})


def test_tokens_that_others_wrote_are_generated_and_not_trained() -> None:
    lengths, trained = (40, 9, 30, 71), (10, 9, 0, 50)
    group = RecordedGroup(0, lengths, (1.0, 0.0, 1.0, 0.0), (True, False) * 2, trained)
    circle = Circle(config(12, max_staleness=2), Model(Answers((group,)), SPEED, Line(0.0, 0.001), FREE))
    rows = circle.run()
    assert {row["tokens/trained"] for row in rows} == {4 * sum(trained)}
    assert sum(each.tokens for each in circle.groups) == len(circle.groups) * sum(lengths)
    for step in range(4):
        batch = Batch(step=step + 3, groups=tuple(circle.groups[4 * step : 4 * step + 4]))
        counted, expected = staleness(batch), batch_metrics(batch)
        assert counted == pytest.approx({name: expected[name] for name in counted})


@pytest.mark.parametrize(("longest", "tokens"), [(None, 100), (100, 250), (120, 100)])
def test_answers_of_several_turns_are_cut_only_where_a_turn_may_have_fewer_tokens_than_it_had(
    longest: int | None, tokens: int
) -> None:
    circle = Circle(config(6, max_staleness=1), Model(answers(250), SPEED, FREE, FREE, longest=longest))
    circle.run()
    assert {sample.spans[-1].end for group in circle.groups for sample in group.samples} == {tokens}


@pytest.mark.parametrize(("parts", "at_once", "times"), [({}, 1, 4), ({}, 4, 1), ({"at_once": 2}, 1, 2)])
def test_as_many_servers_get_a_version_at_once_as_the_configuration_says(
    parts: dict[str, Any], at_once: int, times: int
) -> None:
    circle = Circle(config(6, workers=4, max_staleness=2, at_once=at_once), model(update=Line(0.5, 0.0), **parts))
    circle.run()
    ends = {round(update["time"], 6) for update in circle.updates if update["version"] == "1.0"}
    assert len(ends) == times


def test_those_that_are_left_get_a_version_when_all_have_it_that_got_it_at_once() -> None:
    given = config(12, workers=4, max_staleness=2, at_once=2, interruption="drain")
    circle = Circle(given, model(update=Line(0.5, 0.0)))
    circle.run()
    unlike = 0
    for version in {update["version"] for update in circle.updates}:
        begun = []  # when each server has nothing in flight any more, and when it has the version
        for update in circle.updates:
            if update["version"] == version:
                begun.append((update["time"] - update["seconds"], update["time"]))
        (first, _), (second, has_it), (third, _), _ = sorted(begun)
        unlike += second > first  # they drain for unlike times
        assert third >= has_it
    assert unlike


@pytest.mark.parametrize("in_flight", [1, 3, 4, 6, 9])
def test_servers_of_a_worker_have_its_groups_in_flight_among_them(in_flight: int) -> None:
    circle = Circle(config(servers=4, in_flight=in_flight, max_staleness=8), model())
    circle.run()
    changes = [(group.started, 1) for group in circle.groups] + [(group.finished, -1) for group in circle.groups]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    assert most == in_flight


def test_heartbeats_keep_tickets_for_longer_than_a_lease() -> None:
    circle = Circle(config(6, lease=2), model(ServerSpeed(step=0.1, sample=0.0)))
    circle.run()
    assert max(group.finished - group.started for group in circle.groups) > 3 * 2
    assert {group.attempt for group in circle.groups} == {0}


def test_a_group_that_takes_too_long_is_given_up_as_the_service_does_it() -> None:
    circle = Circle(config(6, lease=1, group_timeout=4), model(ServerSpeed(step=0.1, sample=0.0)))
    rows = circle.run()
    in_time = [group for group in circle.groups if max(len(sample.output_ids) for sample in group.samples) < 70]
    assert len(rows) == 6
    assert 0 < len(in_time) < len(circle.groups)
    assert sum(row["tokens/generated"] for row in rows) == sum(group.tokens for group in in_time)


def test_a_run_that_its_service_gives_up_is_refused_with_the_reason() -> None:
    given = config(group_timeout=10)
    hasty = given.model_copy(update={"run": given.run.model_copy(update={"progress_timeout": 20.0})})
    with pytest.raises(ConfigError, match=r"fails at step 0.*run\.progress_timeout=20 s: the learner is at its step"):
        Circle(hasty, model(learner=Line(30.0, 0.0))).run()


def test_a_drain_lets_no_answer_have_two_versions() -> None:
    parts = model(learner=Line(0.2, 0.0), update=Line(0.1, 0.0))
    mixed = {}
    for interruption in ("retract", "drain"):
        circle = Circle(config(30, max_staleness=2, interruption=interruption), parts)
        circle.run()
        mixed[interruption] = max(len(sample.spans) for group in circle.groups for sample in group.samples)
    assert mixed["drain"] == 1 < mixed["retract"]


def test_caches_are_computed_again_where_the_interruption_loses_them() -> None:
    parts = model(ServerSpeed(step=0.01, sample=0.0005, prefill=0.1, again=0.05), learner=Line(0.2, 0.0))

    def seconds(interruption: str) -> float:
        circle = Circle(config(30, max_staleness=2, interruption=interruption), parts)
        circle.run()
        return circle.rows[-1]["time"] - circle.rows[0]["time"]

    assert seconds("retract") == seconds("abort") > 1.05 * seconds("in_place")


ORDERS = st.one_of(
    st.fixed_dictionaries({"order": st.just("fifo")}),
    st.fixed_dictionaries({"order": st.just("windowed"), "window": st.integers(2, 4)}),
    st.fixed_dictionaries({"order": st.just("ready"), "over_age": st.just("drop")}),
)


SETTINGS = st.fixed_dictionaries(
    {
        "max_staleness": st.sampled_from([1.0, 1.5, 2.0, 4.0]),
        "every": st.integers(1, 2),
        "interruption": st.sampled_from(["retract", "in_place", "drain", "abort"]),
        "placement": st.sampled_from(["separate", "shared"]),
    }
)


@settings(max_examples=25)
@given(order=ORDERS, replay=SETTINGS, workers=st.integers(1, 3), seconds=st.tuples(st.floats(0, 2), st.floats(0, 0.5)))
def test_no_setting_breaks_the_bound_or_loses_a_token(
    order: dict[str, Any], replay: dict[str, Any], workers: int, seconds: tuple[float, float]
) -> None:
    assume(replay["placement"] == "separate" or replay["interruption"] == "retract")
    wide = order.get("window", 1) - 1
    assume((replay["max_staleness"] + 1) * 4 - wide >= 4 * replay["every"])  # else it is refused: it would deadlock
    setting = config(8, workers, **replay, **order)
    train, pause = seconds
    parts = model(learner=Line(train, 0.0), update=Line(pause, 0.001), copy=0.01, transfer=0.01, delivery=0.01)
    rows = Circle(setting, parts).run()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["staleness/max"] for row in rows) <= math.ceil(setting.replay.bound)
    trained, generated = (sum(row[f"tokens/{which}"] for row in rows) for which in ("trained", "generated"))
    assert trained <= generated
    if order["order"] == "fifo":  # nothing is dropped: what is not trained yet is in the slots
        assert generated - trained <= setting.replay.slots * 4 * 70


FLEET = """
gpus: [16, 64]
shares: [0.25, 0.5]
server: {gpus: 4, step: 0.02, sample: 0.0002, prefill: 20000, max_running: 64}
learner: {tokens: 2000, fixed: 1.0, doubling: 0.95}
answers: {prompt: 200, median: 300, sigma: 0.8, longest: 2000}
publish: {pause: 0.5}
config: {replay.groups_per_step: 16, replay.max_staleness: 2, generate.group_size: 4}
"""


def test_a_fleet_is_planned_for_every_split_and_the_best_is_marked(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    rows = plan(read_fleet(tmp_path / "fleet.yaml"))
    assert [(row.gpus, row.generating, row.servers) for row in rows] == [
        (16, 4, 1),
        (16, 8, 2),
        (64, 16, 4),
        (64, 32, 8),
    ]
    assert [sum(row.best for row in rows if row.gpus == gpus) for gpus in (16, 64)] == [1, 1]
    small, large = (max(row.figures.trained for row in rows if row.gpus == gpus) for gpus in (16, 64))
    assert small < large < 4 * small


def test_a_large_bound_does_not_make_a_split_look_faster_than_its_servers(tmp_path: Path) -> None:
    """All slots are in flight at once, so that the first thirteen steps are as fast as the learner."""
    text = FLEET.replace("gpus: [16, 64]\nshares: [0.25, 0.5]", "gpus: [64]\nshares: [0.25, 0.75]")
    text = text.replace("step: 0.02, sample: 0.0002", "step: 0.001, sample: 0.001").replace("sigma: 0.8", "sigma: 0.1")
    text = text.replace("max_running: 64", "max_running: 1000").replace("tokens: 2000", "tokens: 700")
    text = text.replace("pause: 0.5", "pause: 0.0")
    text = text.replace("replay.max_staleness: 2", "replay.max_staleness: 12, generate.lag: 12")
    (tmp_path / "fleet.yaml").write_text(text)
    few, many = plan(read_fleet(tmp_path / "fleet.yaml"))
    assert (few.servers, few.best, many.servers, many.best) == (4, False, 12, True)
    assert few.figures.trained == pytest.approx(4 * 1000, rel=0.1)  # what its servers generate at the most
    with pytest.raises(ConfigError, match=r"run\.steps: 20 are too few, of which 31 do not count; allowed: above 32"):
        plan(read_fleet(tmp_path / "fleet.yaml"), ["run.steps=20"])


def test_the_documented_fleet_file_is_one(tmp_path: Path) -> None:
    text = Path("docs/simulate.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "fleet.yaml").write_text(text.replace("gpus: [64, 128, 256, 512, 1024, 2048, 4096]", "gpus: [64]"))
    fleet = read_fleet(tmp_path / "fleet.yaml")
    rows = plan(fleet.model_copy(update={"shares": (0.5,)}), ["run.steps=13", "replay.groups_per_step=32"])
    assert [(row.gpus, row.servers) for row in rows] == [(64, 4)]


def test_the_keys_of_a_fleet_file_have_the_values_of_yaml(tmp_path: Path) -> None:
    text = FLEET.replace("gpus: [16, 64]", "gpus: [16]").replace("config: {", "config: {generate.lag: null, ")
    (tmp_path / "fleet.yaml").write_text(text)
    assert [row.servers for row in plan(read_fleet(tmp_path / "fleet.yaml"))] == [1, 2]


def test_a_wrong_fleet_file_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("step: 0.02", "step: -1"))
    with pytest.raises(ConfigError, match=r"server\.step"):
        read_fleet(tmp_path / "fleet.yaml")
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("gpus: [16, 64]", "gpus: [4]"))
    with pytest.raises(ConfigError, match="hold no server"):
        plan(read_fleet(tmp_path / "fleet.yaml"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a\n", "no mapping; allowed: gpus, shares, server, learner, answers, publish, config"),
        ("", "no mapping; allowed: gpus"),
        (FLEET.replace("step: 0.02, ", ""), "server.step: is missing; allowed: seconds of a decoding step"),
        (FLEET.replace("publish: {pause: 0.5}\n", ""), "publish: is missing; allowed: publishing"),
        (FLEET.replace("step: 0.02", "step: 0.02, stop: 1"), "server.stop: unknown key; allowed: gpus, step, sample"),
        (FLEET.replace("step: 0.02", "step: fast"), "server.step: fast: Input should be a valid number"),
        (FLEET.replace("gpus: [16, 64]", "gpus: [16, none]"), "gpus.1: none: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_with_a_fleet_file_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_fleet(tmp_path / "fleet.yaml")
    (told,) = refused.value.lines
    assert line in told


def test_a_fleet_file_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--fleet: \S+/nope.yaml: No such file or directory; allowed: a YAML file"):
        read_fleet(tmp_path / "nope.yaml")


def test_no_group_of_a_fleet_is_too_slow_to_count(tmp_path: Path) -> None:
    """Every answer takes 1200 s, which is more than a group may take by default."""
    slow = FLEET.replace("median: 300, sigma: 0.8, longest: 2000", "median: 6000, sigma: 0, longest: 8000")
    text = slow.replace("step: 0.02, sample: 0.0002", "step: 0.2, sample: 0")
    (tmp_path / "fleet.yaml").write_text(text.replace("gpus: [16, 64]", "gpus: [16]"))
    fleet = read_fleet(tmp_path / "fleet.yaml")
    assert Config().replay.group_timeout < 1200
    assert all(row.figures.trained > 0 for row in plan(fleet))


def test_the_longest_answer_of_a_fleet_is_that_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with pytest.raises(ConfigError, match=r"generate.sampling.max_new_tokens: answers.longest of the file says it"):
        plan(read_fleet(tmp_path / "fleet.yaml"), ["generate.sampling.max_new_tokens=300"])


def test_answers_of_any_spread_are_cut_at_the_longest(tmp_path: Path) -> None:
    text = FLEET.replace("median: 300, sigma: 0.8", "median: 1.0e+307, sigma: 10").replace(
        "gpus: [16, 64]", "gpus: [16]"
    )
    (tmp_path / "fleet.yaml").write_text(text.replace("shares: [0.25, 0.5]", "shares: [0.5]"))
    (row,) = plan(read_fleet(tmp_path / "fleet.yaml"))
    assert row.figures.trained > 0


@pytest.mark.parametrize(
    ("part", "wrong", "told"),
    [
        ("gpus: [16, 64]", "gpus: []", "gpus: "),
        ("shares: [0.25, 0.5]", "shares: [0.5, -0.5]", r"shares\.1: "),
        ("sigma: 0.8", "sigma: 1000", r"answers\.sigma: "),
        ("gpus: [16, 64]", "gpus: [16]\ngpus: [64]", "occurs twice"),
        ("gpus: [16, 64]", "gpus: [\xff]", "not text"),
    ],
)
def test_a_fleet_file_that_says_nothing_or_no_text_is_refused_before_the_first_simulation(part, wrong, told, tmp_path):
    assert part in FLEET
    (tmp_path / "fleet.yaml").write_text(FLEET.replace(part, wrong), encoding="latin-1")
    with pytest.raises(ConfigError, match=told):
        read_fleet(tmp_path / "fleet.yaml")


def test_by_sample_a_long_answer_keeps_one_place_and_the_bound_holds() -> None:
    parts = Model(answers(4, 4, 4, 80), ServerSpeed(0.01, 0.0), Line(0.05, 0.0), FREE)
    given = config(steps=30, max_staleness=4, in_flight=2)
    found = {}
    for submission in ("group", "sample"):
        generate = given.generate.model_copy(update={"submission": submission})
        circle = Circle(given.model_copy(update={"generate": generate}), parts)
        found[submission] = figures(circle.run())
        assert found[submission].staleness_max <= 4
    assert found["sample"].trained > 1.3 * found["group"].trained
    assert found["sample"].staleness_mean > found["group"].staleness_mean


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("generate.servers=4", r"^--fleet: generate\.servers: shares of the file says it; allowed: leave it out$"),
        (
            "publish.transport=memory publish.at_once=8",
            r"^--fleet: publish\.at_once: publish\.at_once of the file says it; allowed: leave",
        ),
        (
            "replay.group_timeout=10",
            r"^--fleet: replay\.group_timeout: its effect is not modelled; allowed: run\.steps",
        ),
        ("learner.passes=4", r"^--fleet: learner\.passes: its effect is not modelled; allowed: "),
        ("replay.adaptive.enabled=true", r"^--fleet: replay\.adaptive\.enabled: no file of figures says what data"),
        ("replay.reuse=4", r"^--fleet: replay\.reuse: no file of figures says what data teaches; allowed: simulate"),
    ],
)
def test_a_key_that_a_fleet_does_not_model_or_its_file_says_is_refused(given: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with pytest.raises(ConfigError, match=line):
        plan(read_fleet(tmp_path / "fleet.yaml"), given.split())
