"""`streamrl tune`: the search against all settings, what is no choice is said, and real runs that are tuned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.lab.simulate import calibration
from streamrl.lab.simulate.figures import Figures
from streamrl.lab.simulate.model import Line
from streamrl.lab.tune.runs import Calibration
from streamrl.lab.tune.search import Found, Point, Rule, choose, explore, front, limit, search
from streamrl.lab.tune.space import Devices, Setting, Space, own_devices
from streamrl.lab.tune.speeds import LearnerSpeeds
from streamrl.observe.metrics import read_metrics
from tests.lab.test_simulate_run import config, record, truth

SIZES = (6, 8, 3)


def figure(trained: float, age: float, learner: float = 0.5, servers: float = 0.5) -> Figures:
    return Figures(trained, trained, learner, servers, age, age, math.ceil(age))


def made_up(point: Point) -> Figures | None:
    """Rises with the bound and falls on both sides of a best number in flight; publishing less often ages."""
    bound, in_flight, every = point
    if every > bound:
        return None
    speed = 1000 * (1 - 0.5 ** (bound + 1)) * (1 - 0.05 * abs(in_flight - bound - 1)) * (1 + 0.02 * every)
    return figure(speed, 0.8 * bound + 0.05 * in_flight + 0.3 * every)


def every_point() -> dict[Point, Figures]:
    points = product(*map(range, SIZES))
    return {point: figures for point in points if (figures := made_up(point)) is not None}


def test_the_search_finds_the_front_of_all_settings_with_a_part_of_them() -> None:
    everything = every_point()
    found = search(SIZES, [(bound, 3, 0) for bound in range(6)], lambda point, long: made_up(point), most=200)
    assert found.complete
    assert found.simulated < len(everything)
    assert found.front == front(everything)


def test_a_search_that_is_ended_by_its_limit_says_so() -> None:
    found = search(SIZES, [(0, 0, 0), (5, 0, 0)], lambda point, long: made_up(point), most=9)
    assert not found.complete
    assert found.simulated == 9
    assert found.front


def test_what_cannot_run_costs_nothing_and_is_no_choice() -> None:
    known = explore((3,), [(0,)], lambda point: None if point == (1,) else figure(1.0, 0.0), most=3)
    assert known == {(0,): figure(1.0, 0.0)}


FRONT = [
    Found((place,), figure(speed, age)) for place, (speed, age) in enumerate([(50, 0), (95, 1), (99, 2), (100, 4)])
]


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        (Rule(), 2),
        (Rule(within=0.0), 3),
        (Rule(within=0.06), 1),
        (Rule(mean_age=1.5), 1),
        (Rule(mean_age=0.0, within=0.0), 0),
    ],
)
def test_a_rule_chooses_from_the_front(rule: Rule, chosen: int) -> None:
    assert choose(FRONT, rule).point == (chosen,)


def test_a_rule_that_nothing_is_fresh_enough_for_says_what_is() -> None:
    with pytest.raises(ValueError, match=r"1 is below the 2\.00 of the freshest"):
        choose(FRONT[2:], Rule(mean_age=1.0))


def test_what_limits_is_the_side_that_is_never_idle() -> None:
    said = [limit(figure(1, 1, *idle)) for idle in ((0.01, 0.4), (0.4, 0.01), (0.01, 0.01), (0.4, 0.4))]
    assert said == [
        "the learner limits", "the servers limit", "both sides are busy", "each side waits for the other"
    ]  # fmt: skip


# -- which settings there are


def loader(*words: str) -> Callable[..., Config]:
    return lambda further=(): config_file.load(None, [*words, *further])


def space(*words: str, devices: Devices | None = None, oldest: float = 4.0, seen: int = 64) -> Space:
    load = loader(*words)
    return Space(load, devices or own_devices(load(), "cores"), oldest=oldest, seen=seen)


def settings(found: Space) -> Iterator[Setting]:
    return (found.setting(point) for point in product(*map(range, found.sizes)))


def test_a_search_begins_at_the_configured_split_also_where_more_ranks_would_fit() -> None:
    found = space(*SMALL, "generate.workers=2", devices=Devices("cores", 6))
    begin = found.setting(found.begins()[0])
    assert (begin.workers, begin.ranks) == (2, 1)


SMALL = ("replay.groups_per_step=8", "generate.groups_in_flight=16")


def test_every_setting_differs_from_the_configuration_in_what_it_says_alone() -> None:
    found = space(*SMALL)
    own = found.configured
    assert own in set(settings(found))
    assert found.overrides(own) == ()
    assert found.setting(found.begins()[0]) == own
    other = Setting(bound=1, window=4, in_flight=6, every=2, workers=1, ranks=1, micro_batch=own.micro_batch)
    words = found.overrides(other)
    assert {word.partition("=")[0] for word in words} == {
        "replay.max_staleness", "replay.order", "replay.window", "generate.groups_in_flight", "publish.every",
    }  # fmt: skip
    loaded = found.loaded(other)
    assert loaded is None  # 13 slots, and two steps between two versions need 16
    assert found.loaded(Setting(**{**{name: getattr(other, name) for name in other.__slots__}, "every": 1})) is not None


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (("replay.order=synchronous",), "replay.max_staleness: replay.order=synchronous has a bound of its own"),
        (("replay.order=ready",), "replay.window: replay.order=ready is neither strict nor windowed"),
        (("generate.attach=[http://a:1]",), "generate.workers, learner.ranks: generate.attach: 1 running servers"),
        (("run.placement=shared",), "both sides have the same devices"),
        (
            ("generate.submission=sample", "generate.requests_in_flight=auto"),
            "generate.requests_in_flight: auto takes as many as the KV cache allows",
        ),
    ],
)
def test_what_is_no_axis_of_a_run_is_left_out_by_name(words: tuple[str, ...], left_out: str) -> None:
    found = space(*words)
    assert any(left_out in line for line in found.left_out), found.left_out


def test_devices_are_divided_between_ranks_and_workers() -> None:
    found = space(*SMALL, devices=Devices("cores", 8))
    configured = (1, 1)
    assert found.splits == (configured, *((workers, 8 - workers) for workers in range(1, 8)))
    assert len(space(*SMALL, devices=Devices("cores", 200)).splits) == 1 + 16
    wide = space(*SMALL, "generate.servers=2", "learner.layout.tensor=2", "learner.ranks=2", devices=Devices("GPUs", 8))
    assert wide.splits == ((1, 2), (1, 6), (2, 4), (3, 2))
    with pytest.raises(
        ConfigError, match="--gpus: 1 hold no worker of 1 and 1 learner ranks of 1; allowed: 2 and more"
    ):
        space(*SMALL, devices=Devices("GPUs", 1))


def test_by_sample_requests_are_what_is_in_flight_and_a_lag_is_taken_away() -> None:
    found = space("generate.submission=sample", "generate.lag=0", "replay.groups_per_step=8")
    own = found.configured
    assert own.in_flight == 8
    half = Setting(**{**{name: getattr(own, name) for name in own.__slots__}, "in_flight": 4})
    assert found.overrides(half) == ("generate.lag=null", "generate.requests_in_flight=32")
    assert found.loaded(half) is not None


def test_the_configured_setting_with_a_lag_is_the_configuration_itself() -> None:
    words = ("generate.lag=0", "replay.groups_per_step=4", "generate.workers=3")
    found = space(*words)
    assert (found.configured.in_flight, found.overrides(found.configured)) == (4, ())
    assert found.loaded(found.configured) == config_file.load(None, words)
    lagging = space("generate.lag=-0.5", "replay.groups_per_step=4", devices=Devices("cores", 8))
    assert lagging.splits == space("replay.groups_per_step=4", devices=Devices("cores", 8)).splits


def test_fewer_may_be_in_flight_than_the_configuration_begins_with() -> None:
    found = space(*SMALL, "generate.least_in_flight=16")
    fresh = changed(found.configured, bound=0, in_flight=4)
    assert found.overrides(fresh)[-2:] == ("generate.groups_in_flight=4", "generate.least_in_flight=4")
    assert found.loaded(fresh) is not None


def test_no_setting_has_far_more_in_flight_than_any_calibration() -> None:
    few = space(*SMALL, oldest=8, seen=4)
    assert max(setting.in_flight for setting in settings(few) if setting != few.configured) == 16  # the configured one
    assert {setting.in_flight for setting in settings(few)} >= {1, 2, 8}


def test_no_worker_has_far_more_in_flight_than_in_any_calibration() -> None:
    found = space(*SMALL, oldest=8, seen=4, devices=Devices("cores", 5))
    four = changed(found.configured, bound=8, in_flight=32, workers=4)
    assert found.loaded(four) is not None
    assert found.loaded(changed(four, workers=3)) is None  # 11 each
    assert found.loaded(found.configured) is not None  # 16 on one worker, which is configured so
    assert found.loaded(changed(found.configured, bound=8)) is None
    line = "generate.groups_in_flight: more than 8 groups a worker are beyond 2 times those of the calibration"
    assert line in found.left_out
    assert all(found.loaded(found.setting(point)) is not None for point in found.begins())
    assert not any("in_flight" in line for line in space(*SMALL, oldest=1, seen=8).left_out)


def test_the_configured_setting_is_there_although_another_one_is_like_it() -> None:
    found = space(oldest=8, seen=32)  # 32 groups in flight, and 24 slots
    own = found.configured
    assert found.loaded(own) is not None
    assert found.setting(found.begins()[0]) == own
    assert found.loaded(changed(own, bound=1)) is None


def test_a_window_that_the_configured_order_has_no_use_for_is_none() -> None:
    found = space(*SMALL, "replay.window=32")
    own = found.configured
    assert (own.window, found.overrides(own)) == (1, ())
    assert 32 not in {setting.window for setting in settings(found)}
    loaded = found.loaded(changed(own, window=8))
    assert loaded is not None
    assert (loaded.replay.order, loaded.replay.window) == ("windowed", 8)
    wide = space(*SMALL, "replay.order=windowed", "replay.window=8")
    assert wide.configured.window == 8
    assert wide.overrides(changed(wide.configured, window=1)) == ("replay.order=fifo", "replay.window=1")


def changed(setting: Setting, **values: float) -> Setting:
    return replace(setting, **values)


def test_other_learners_are_measured_or_assumed_by_name() -> None:
    speeds = LearnerSpeeds(Line(1.0, 0.01), own=(2, 100), measured={(2, 200): 0.5, (4, 100): 0.6}, doubling=0.8)
    assert speeds.micro_batches == [100, 200]
    assert speeds.line(4, 100).each == pytest.approx(0.006)
    assert speeds.line(4, 200).each == pytest.approx(0.003)
    assert speeds.line(8, 100).each == pytest.approx(0.006 / 2 / 0.8)  # from the nearest measured one on
    assert speeds.line(8, 100).fixed == pytest.approx(0.6)
    assert speeds.line(1, 100).each == pytest.approx(0.01 * 2 * 0.8)  # by the same law
    assert 0.006 < speeds.line(3, 100).each < 0.01
    assumed = list(speeds.assumptions({(2, 100), (4, 200), (8, 100)}))
    assert len(assumed) == 2
    assert (
        "learner.ranks=8: not measured; between measured ones as those, beyond them each doubling keeps 80%"
        in assumed[0]
    )


def test_ranks_that_nobody_measured_are_no_faster_than_measured_ones_let_expect() -> None:
    poor = LearnerSpeeds(Line(0.0, 0.001), own=(1, 4096), measured={(2, 4096): 0.95, (4, 4096): 0.9})
    seconds = [poor.line(ranks, 4096).each for ranks in (1, 2, 3, 4, 5, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == pytest.approx(0.001 * 0.95 * (0.9 / 0.95) ** math.log2(1.5))


# -- the command


def test_a_finished_run_is_tuned_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "CALLS", 60)  # a coarse fit
    given = config(tmp_path, "known", groups_per_step=4)
    run = record(given.model_copy(update={"run": given.run.model_copy(update={"steps": 8})}), truth())
    written, figures = tmp_path / "tuned.yaml", tmp_path / "figures.json"
    words = ["tune", str(run), "--oldest", "1", "--points", "8", "-o", str(written), "--json", str(figures)]
    assert cli.main(words) == 0
    said, found = capsys.readouterr().out, json.loads(figures.read_text())
    assert "left out: learner.tokens_per_micro_batch: 4096 alone was measured" in said
    *_, command, last = said.splitlines()
    assert last == f"written: {written}"
    assert "divided: 2 cores" in said.splitlines()
    assert found["divided"] == {"unit": "cores", "count": 2}
    assert command.split(" train ")[1].split()[:2] == [str(run / "config.yaml"), "run.name=known-tuned"]
    assert found["choice"] in found["front"]
    assert max(each["bound"] for each in found["front"]) <= 1
    tuned = config_file.load(written)
    assert tuned.run.name == "known-tuned"
    assert tuned.replay.max_staleness == found["choice"]["bound"]
    for flag in (["--folder", str(tmp_path / "more")], ["--steps", "9"], ["--budget", "60"]):
        assert cli.main(["tune", str(run), *flag]) == 2
        assert f"{flag[0]}: {flag[1]}" in capsys.readouterr().err


def test_calibration_runs_say_what_they_will_take_and_refuse_those_of_another_configuration(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    config_file.save(config_file.load(None, [*SMALL, f"model.path={tmp_path}"]), file)

    def runs(*words: str) -> Calibration:
        return Calibration(file, words, tmp_path / "runs", steps=6, budget=60.0, ranks=[2, 3, 64])

    first = runs()
    first.prepare()
    (line,) = first.lines()
    assert "2 runs of 6 steps (384 answers each)" in line
    assert "ended after 60 s" in line
    assert 64 not in first.ranks
    folder = tmp_path / "runs" / "calibration"
    folder.mkdir(parents=True)
    config_file.save(first._load("calibration", ()), folder / "config.yaml")
    runs().prepare()
    with pytest.raises(ConfigError, match=r"calibration was run with another generate\.group_size"):
        runs("generate.group_size=4").prepare()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_configuration_is_calibrated_by_real_runs_tuned_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model.make(tmp_path / "tiny")
    small = ["model.path=tiny", "generate.group_size=4", "generate.groups_in_flight=8", "replay.groups_per_step=4"]
    more = ["learner.tokens_per_micro_batch=64", "run.steps=2"]
    config_file.save(config_file.load(None, [*small, *more]), Path("settings.yaml"))
    words = ["tune", "settings.yaml", "--steps", "8", "--points", "8", "--oldest", "1", "-o", "tuned.yaml"]
    assert cli.main([*words, "--json", "figures.json"]) == 0
    said = capsys.readouterr().out
    assert "2 runs of 8 steps" in said
    made = {path.name for path in Path("runs/run-tune").iterdir() if path.is_dir()}
    assert {"calibration", "few-in-flight", "learner-1-64"} <= made
    times = {path: path.stat().st_mtime for path in Path("runs/run-tune").rglob("metrics.jsonl")}
    assert cli.main(words) == 0  # nothing is run again
    assert times == {path: path.stat().st_mtime for path in Path("runs/run-tune").rglob("metrics.jsonl")}
    assert "done before: calibration, few-in-flight" in capsys.readouterr().out
    assert cli.main(["train", "tuned.yaml"]) == 0
    assert len(list(read_metrics(Path("runs/run-tuned")))) == 2
