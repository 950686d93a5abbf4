"""Stored sweeps: what is kept of one, what the pages have from it, and what their findings may say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import stored_sweeps
from benchmarks.stored_sweeps import (
    drawn,
    joined,
    missing,
    read_stored,
    shown,
    stored,
    unsupported,
    written,
    wrong_findings,
)
from streamrl.lab.sweep.figures import COLUMNS
from streamrl.lab.sweep.plan import read

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/*.md"))
LARGEST = 1_000_000  # bytes of all stored sweeps
MACHINE = {"processor": "Some CPU", "cores": 2, "gpu": ""}
PAGE = """# Page
<!-- mine table: from benchmarks/results -->
<!-- end of mine table -->
kept
<!-- mine differences: from benchmarks/results -->
old
<!-- end of mine differences -->
<!-- mine findings: from benchmarks/results -->
{}
<!-- end of mine findings -->
"""


def results(rewards: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """The results.json of a sweep with these rewards of each point's seeds 1, 2, ..."""
    baseline = next(iter(rewards))
    points = [
        {
            "name": name, "column": name, "series": "", "settings": {"algo.weight_cap": 2}, "baseline": baseline,
            "unfinished": {},
            "runs": {str(seed): {"reward": each, "KL": 0.0123456789} for seed, each in enumerate(values, 1)},
        }
        for name, values in rewards.items()
    ]  # fmt: skip
    seeds = list(range(1, 1 + max(map(len, rewards.values()))))
    head = {
        "sweep": "mine",
        "base": "configs/quickstart.yaml",
        "axis": "point",
        "baseline": baseline,
        "common": ["run.steps=9"],
        "seeds": seeds,
        "target": None,
        "columns": list(COLUMNS),
        "ratios": [],
    }
    return {**head, "points": points, **more}


def kept_of(content: dict[str, Any], commit: str = "abc1234", **machine: Any) -> dict[str, Any]:
    """What is stored of a results.json whose runs are all of one commit."""
    runs = [f"{point['name']}-seed{seed}" for point in content["points"] for seed in point["runs"]]
    return stored(content, dict.fromkeys(runs, commit), MACHINE | machine)


@pytest.fixture
def sweep() -> dict[str, Any]:
    rewards = {"default": [0.5, 0.7, 0.6], "cap-5": [0.4, 0.7, 0.4], "cap-1.2": [0.9, 0.9, 0.9]}
    return kept_of(results(rewards))


def test_the_pages_have_the_tables_and_the_figures_of_the_stored_sweeps():
    sweeps = read_stored()
    for page in PAGES:
        text = page.read_text()
        assert shown(text) <= {name for name, kept in sweeps.items() if not missing(kept)}, page.name
        assert written(text, sweeps) == text, f"{page.name}: python -m benchmarks.stored_sweeps writes it"
        assert wrong_findings(text, sweeps) == [], page.name


def test_each_stored_sweep_is_on_a_page_and_of_its_file_as_it_is():
    on_pages = set().union(*(shown(page.read_text()) for page in PAGES))
    for name, kept in read_stored().items():
        assert name in on_pages or missing(kept)
        now = read(ROOT / "configs" / "experiments" / f"{name}.yaml")
        assert {point["name"]: (point["settings"], point["baseline"]) for point in kept["points"]} == {
            point.name: (point.settings, point.baseline) for point in now.points
        }
        assert kept["base"] == str(now.base.relative_to(ROOT) if now.base.is_absolute() else now.base)
        assert (kept["common"], kept["seeds"]) == (list(now.common), list(now.seeds))
        assert (kept["axis"], kept["baseline"], kept["target"]) == (now.axis, now.baseline, now.target)
        assert (kept["columns"], kept["ratios"]) == (list(now.columns), list(now.ratios))
        runs = {f"{point['name']}-seed{seed}" for point in kept["points"] for seed in point["runs"]}
        assert {run for of_commit in kept["commits"].values() for run in of_commit} == runs


def test_the_pictures_are_of_the_stored_sweeps():
    for name, kept in read_stored().items():
        if not missing(kept):
            file = ROOT / "docs" / "pictures" / f"{name}.svg"
            assert file.read_text() == drawn(kept), f"{name}: python -m benchmarks.stored_sweeps draws it"


def test_a_picture_has_a_mark_for_each_run_and_each_mean(sweep):
    root = ElementTree.fromstring(drawn(sweep))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:3] == ["default", "cap-5", "cap-1.2"]
    assert "reward, 0 to 0.9" in texts
    circles = [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 9  # of rewards; no run has another figure that is shown
    assert {each["fill"] for each in circles[:3]} != {each["fill"] for each in circles[3:]}
    places = [float(each["cx"]) for each in circles]
    assert places[6:] == [max(places)] * 3
    assert places[0] < places[2] < places[1]


def test_a_picture_of_negative_rewards_begins_at_the_least_of_them():
    root = ElementTree.fromstring(drawn(kept_of(results({"default": [-2.0, -1.0], "cap-5": [-0.5, 0.0]}))))
    assert "reward, -2 to 0" in [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    places = [float(each.attrib["cx"]) for each in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(set(places)) == 4
    assert places == sorted(places)


def test_stored_sweeps_stay_small():
    assert sum(file.stat().st_size for file in stored_sweeps.RESULTS.glob("*.json")) < LARGEST


def test_the_figures_of_each_run_are_kept_with_six_digits_and_where_they_come_from(sweep):
    assert sweep["points"][0]["runs"]["2"] == {"reward": 0.7, "KL": 0.0123457}
    runs = [f"{point}-seed{seed}" for point in ("default", "cap-5", "cap-1.2") for seed in (1, 2, 3)]
    assert (sweep["commits"], sweep["machines"]) == ({"abc1234": runs}, [MACHINE])


@pytest.mark.parametrize(("commit", "told"), [("abc1234-dirty", "abc1234-dirty"), ("", "unknown")])
def test_a_sweep_of_code_of_no_commit_is_not_stored(commit, told):
    with pytest.raises(ValueError, match=f"mine: {told}, its code is of no commit"):
        kept_of(results({"default": [0.5]}), commit)


@pytest.mark.parametrize("key", ["columns", "points.baseline"])
def test_a_sweep_of_a_time_when_less_was_kept_is_not_stored(key):
    former = results({"default": [0.5]})
    del (former["points"][0] if "." in key else former)[key.removeprefix("points.")]
    with pytest.raises(ValueError, match=f"mine: results.json has no {key}; allowed: that of `streamrl sweep FILE --r"):
        kept_of(former)


@pytest.mark.parametrize("setting", ["model.path=/home/me/tiny", "task.args={file: '/data/a b'}", "a=[x, /y]"])
def test_a_sweep_with_paths_of_a_machine_is_not_stored(setting):
    with pytest.raises(ValueError, match="is a path of one machine") as refused:
        kept_of(results({"default": [0.5]}, common=[setting]))
    assert setting in str(refused.value)


def test_a_sweep_whose_base_is_elsewhere_is_not_stored():
    with pytest.raises(ValueError, match=r"base=/home/me/base.yaml is a path of one machine"):
        kept_of(results({"default": [0.5]}, base="/home/me/base.yaml"))


@pytest.mark.parametrize("setting", ["model.path=models/tiny", "generate.attach=[http://host:1/x]", "data=~/a/b"])
def test_other_paths_and_addresses_are_kept(setting):
    assert kept_of(results({"default": [0.5]}, common=[setting]))["common"] == [setting]


def test_parts_of_a_sweep_are_joined_and_say_what_is_missing():
    def part(rewards: dict[str, list[float]], seeds: list[int], **machine: Any) -> dict[str, Any]:
        return kept_of(results(rewards, seeds=seeds), f"commit{len(rewards['a'])}", **machine)

    first = part({"a": [0.5, 0.7], "b": [0.1]}, [1, 2])
    assert missing(first) == ["b-seed2"]
    second = part({"a": [0.6], "b": [0.2, 0.3]}, [1, 2], processor="Another CPU")
    both = joined(first, second)
    assert missing(both) == []
    rewards = {point["name"]: [each["reward"] for each in point["runs"].values()] for point in both["points"]}
    assert rewards == {"a": [0.6, 0.7], "b": [0.2, 0.3]}
    assert both["commits"] == {"commit1": ["a-seed1", "b-seed1", "b-seed2"], "commit2": ["a-seed2"]}
    assert [each["processor"] for each in both["machines"]] == ["Some CPU", "Another CPU"]
    assert joined(both, second) == both


def test_the_seeds_of_joined_parts_are_in_the_order_of_their_numbers():
    def part(seeds: list[int]) -> dict[str, Any]:
        runs = {str(seed): {"reward": 0.5} for seed in seeds}
        content = results({"a": [0.5]}, seeds=[1, 2, 10])
        return kept_of({**content, "points": [{**content["points"][0], "runs": runs}]})

    assert list(joined(part([10, 1]), part([2]))["points"][0]["runs"]) == ["1", "2", "10"]


def test_a_part_with_other_seeds_adds_them():
    first, second = (
        {**content, "points": [{**content["points"][0], "runs": {str(seed): {"reward": reward} for seed in seeds}}]}
        for seeds, reward in (([11, 12], 0.5), ([2, 12], 0.7))
        for content in [kept_of(results({"a": [reward]}, seeds=seeds))]
    )
    both = joined(first, second)
    assert both["seeds"] == [2, 11, 12]
    assert {seed: run["reward"] for seed, run in both["points"][0]["runs"].items()} == {"2": 0.7, "11": 0.5, "12": 0.7}
    assert missing({**both, "seeds": [2, 11, 12, 13]}) == ["a-seed13"]


def test_parts_of_sweeps_with_other_settings_are_not_joined(sweep):
    other = json.loads(json.dumps(sweep))
    other["points"][0]["settings"] = {"algo.weight_cap": 3}
    with pytest.raises(ValueError, match="mine: other points than"):
        joined(sweep, other)
    with pytest.raises(ValueError, match="mine: other common than"):
        joined(sweep, {**sweep, "common": ["run.steps=10"]})


def test_a_sweep_with_a_target_has_the_tokens_to_it_and_their_ratio(sweep):
    sweep["target"] = 0.8
    for point, tokens in zip(sweep["points"], ([100, 200, 400], [50, 100, None], [None] * 3), strict=True):
        for run, count in zip(point["runs"].values(), tokens, strict=True):
            run.update({} if count is None else {"tokens to target": count})
    found = [row[-3] for row in stored_sweeps.table(sweep)]
    assert found == ["tokens to target", "233±379", "75±318(2/3)", "-"]
    _, more = stored_sweeps.ratios(sweep)
    assert more[:5] == ["cap-5", "3", "0.50(2/3)", "0.50..0.50", "0.50..0.50"]
    assert unsupported(sweep, "`cap-5` needs 0.50 of the tokens.") == []


def test_a_figure_of_which_the_sweep_wants_the_ratio_has_it(sweep):
    assert stored_sweeps.ratios(sweep) == []
    sweep["ratios"] = ["reward"]
    head, five, _ = stored_sweeps.ratios(sweep)
    assert (head[2], five[:3]) == ("reward", ["cap-5", "3", "0.81"])
    assert unsupported(sweep, "`cap-5` has 0.81 of the reward.") == []


def test_a_page_gets_its_tables_keeps_the_rest_and_is_not_changed_again(sweep):
    text = written(PAGE.format("Prose."), {"mine": sweep})
    assert "default  0.6±0.2  -" in text
    assert "cap-1.2  0.9      -" in text
    assert "cap-5    3      -0.1±0.2  -0.35..0.15  -0.20..0.00" in text
    assert "kept\n" in text
    assert "old\n" not in text
    assert "Prose.\n" in text
    assert written(text, {"mine": sweep}) == text
    sweep["points"][0]["runs"]["1"]["reward"] = 0.51
    assert written(text, {"mine": sweep}) != text


@pytest.mark.parametrize(
    "findings",
    [
        "`default` ends at 0.6±0.2, `cap-1.2` at 0.9.",
        "- `cap-5` has -0.1±0.2 more than `default`; the interval ends at -0.35 and 0.15.",
        "Of 3 seeds the mean is 0.6, with `algo.weight_cap=1.75` nowhere.",
    ],
)
def test_a_finding_may_say_what_the_rows_of_its_points_have(sweep, findings):
    assert unsupported(sweep, findings) == []


@pytest.mark.parametrize(
    ("findings", "figure"),
    [
        ("`cap-5` ends at 0.9.", "0.9"),  # that is cap-1.2's
        ("The default ends at\n0.61±0.2.", "0.61±0.2"),
        ("It is 1.6 times as good.", "1.6"),
        ("`cap-5` has 0.1±0.2 more.", "0.1±0.2"),  # less
    ],
)
def test_a_finding_may_not_say_another_figure_or_that_of_another_point(sweep, findings, figure):
    (line,) = unsupported(sweep, findings)
    assert line.startswith(f"{figure}: ")
    assert wrong_findings(PAGE.format(findings), {"mine": sweep}) == [line]


def test_a_sweep_of_a_grid_has_a_column_for_it_and_its_points_may_be_named_by_either(sweep):
    for bound, point in zip(("2", "2", "8"), sweep["points"], strict=True):
        name = f"max_staleness_{bound}-{point['name']}"
        point |= {"name": name, "column": bound, "series": point["name"], "baseline": "max_staleness_2-default"}
    sweep |= {"axis": "replay.max_staleness", "baseline": sweep["points"][0]["name"]}
    head, first, *_ = stored_sweeps.table(sweep)
    assert (head[:3], first[:3]) == (["max_staleness", "point", "reward"], ["2", "default", "0.6±0.2"])
    assert unsupported(sweep, "At bound 8 `cap-1.2` has 0.9.") == []
    assert unsupported(sweep, "At bound `8` 0.6±0.2 is reached.") != []
    assert unsupported(sweep, "At bound `8` `cap-1.2` has 0.9.") == []
    assert unsupported(sweep, "At bound `2` `default` has 0.6±0.2: at `8` `cap-1.2` has 0.9.") == []
    assert unsupported(sweep, "At bound `2` `cap-1.2` has 0.9.") != []


def test_the_command_stores_writes_the_pages_and_checks_them(sweep, tmp_path, monkeypatch, capsys):
    folder, pages = tmp_path / "sweeps" / "mine", tmp_path / "docs"
    pages.mkdir()
    runs = [f"{point}-seed{seed}" for point in ("default", "cap-5") for seed in (1, 2)]
    for run in runs:
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "environment.json").write_text('{"commit": "abc1234"}')
    (folder / "results.json").write_text(json.dumps(results({"default": [0.5, 0.7], "cap-5": [0.4, 0.6]})))
    (pages / "page.md").write_text(PAGE.format("`cap-5` has -0.1."))
    monkeypatch.setattr(stored_sweeps, "PAGES", pages)
    monkeypatch.setattr(stored_sweeps, "RESULTS", tmp_path / "results")

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stored_sweeps", *arguments])
        return stored_sweeps.main()

    assert call("--check") == 1
    assert "page.md: mine is not stored" in capsys.readouterr().out
    assert call(str(tmp_path)) == 1
    assert "results.json" in capsys.readouterr().err
    assert call(str(folder)) == 0
    assert "1 stored sweeps; the pages agree with them" in capsys.readouterr().out
    assert json.loads((tmp_path / "results" / "mine.json").read_text())["commits"] == {"abc1234": runs}
    assert call("--check") == 0
    (folder / "results.json").write_text(json.dumps(results({"default": [0.5], "cap-5": [0.4]}, seeds=[1, 2])))
    assert call(str(folder)) == 0  # the other seed stays
    (tmp_path / "results" / "mine.json").unlink()
    assert call(str(folder)) == 1
    told = capsys.readouterr().out
    assert "missing: default-seed2, cap-5-seed2" in told
    assert "page.md: mine lacks 2 runs" in told
    (folder / "results.json").write_text(json.dumps(results({"default": [0.5, 0.7], "cap-5": [0.4, 0.6]})))
    assert call(str(folder)) == 0
    picture = pages / "pictures" / "mine.svg"
    picture.write_text("another")
    assert call("--check") == 1
    assert "pictures/mine.svg: not that of the stored sweep" in capsys.readouterr().out
    assert call() == 0
    page = pages / "page.md"
    page.write_text(page.read_text().replace("0.6±1.3", "0.7±1.3"))
    assert call("--check") == 1
    assert "page.md: its tables are not the stored ones" in capsys.readouterr().out
    assert "0.7±1.3" in page.read_text()
