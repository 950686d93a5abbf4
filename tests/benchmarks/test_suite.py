"""The suite of benchmarks: what counts as fallen, what may be compared, and one real benchmark through it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import suite
from benchmarks.suite import BENCHMARKS, Machine, Outcome, Ratio, comparable, fell, stored_ratios


def test_every_benchmark_of_the_table_is_a_module_that_knows_its_arguments():
    for benchmark in BENCHMARKS:
        text = Path(f"benchmarks/{benchmark.name}.py").read_text()
        for option in ("--json", *(word for word in benchmark.quick if word.startswith("--"))):
            assert f'"{option}"' in text, f"{benchmark.name} has no {option}"


def test_every_benchmark_with_a_command_line_is_in_the_table():
    parts = {"suite", "profiled", "parity_ranks", "fault_roles", "stored_figures"}  # of others
    scripts = {file.stem for file in Path("benchmarks").glob("*.py") if "--json" in file.read_text()}
    assert scripts - parts <= {benchmark.name for benchmark in BENCHMARKS}


# Their quick forms are run by test_adversary.py, test_end_to_end_benchmark.py and test_peers.py, which look closer.
ELSEWHERE = ("adversary", "end_to_end", "peers")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "benchmark",
    [benchmark for benchmark in BENCHMARKS if benchmark.name not in ELSEWHERE],
    ids=lambda benchmark: benchmark.name,
)
def test_a_benchmark_runs_in_its_quick_form(benchmark, tmp_path):
    target = tmp_path / "figures.json"
    command = suite.command(benchmark.name, [*benchmark.quick, "--json", str(target)], None, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    figures = json.loads(target.read_text())
    assert all(ratio.low <= ratio.median <= ratio.high for ratio in benchmark.ratios(figures))


def test_a_ratio_fell_only_when_its_whole_range_is_below_the_stored_one():
    before = Ratio("r", 0.90, 0.85, 0.95)
    assert fell(Ratio("r", 0.80, 0.76, 0.84), before)
    assert not fell(Ratio("r", 0.82, 0.78, 0.86), before)
    assert not fell(Ratio("r", 0.99, 0.98, 1.0), before)


def test_only_the_same_kind_of_machine_and_the_same_form_are_compared():
    here = Machine("Some CPU @ 2 GHz", 2, "")
    stored = {"machine": asdict(here), "quick": True}
    assert comparable(stored, here, quick=True) == ""
    assert "other the full one" in comparable(stored, here, quick=False)
    other = Machine("Some CPU @ 2 GHz", 8, "1 x GPU")
    assert "another machine: some-cpu-2-ghz-2-cores, this one is" in comparable(stored, other, quick=True)


def test_ratios_are_read_where_each_benchmark_has_them():
    row = {"ratio": 0.8, "ratio_spread": 0.1}
    found = {
        "rollout_path": {"rows": [{"tokens": 4096, "stream": row, "curve": row}]},
        "replay": {
            "journal": [
                {"tokens": 9, "ratio_plain": 0.7, "ratio_plain_spread": 0, "ratio_synced": 1, "ratio_synced_spread": 0}
            ]
        },
        "learner": {
            "rows": [
                {"shape": "tiny", **{key: {"of_bare": {"median": 1.0, "spread": 0.2}} for key in ("passes", "step")}}
            ]
        },
        "generation": {"rows": [{"in_flight": 16, "ratio": 0.97, "ratio_spread": 0.0}]},
    }
    ratios = {each.name: list(each.ratios(found[each.name])) for each in BENCHMARKS if each.name in found}
    assert [str(ratio) for ratio in ratios["rollout_path"]] == ["0.8 (0.76 .. 0.84)"] * 2
    assert [ratio.median for ratio in ratios["replay"]] == [0.7, 1]
    assert ratios["learner"][0] == Ratio("passes of bare, tiny", 1.0, 0.9, 1.1)
    assert ratios["generation"] == [Ratio("worker of bare client, 16 in flight", 0.97, 0.97, 0.97)]


def test_a_benchmark_may_name_its_ratios_itself():
    stated = {"ratios": [{"name": "memory of memcpy", "median": 0.9, "low": 0.8, "high": 0.95}]}
    packing = next(each for each in BENCHMARKS if each.name == "packing")
    assert list(packing.ratios(stated)) == [Ratio("memory of memcpy", 0.9, 0.8, 0.95)]
    assert list(packing.ratios({"rows": []})) == []


def test_what_is_stored_gives_the_same_ratios_back_and_keeps_what_was_left_out_later(tmp_path, capsys):
    path = tmp_path / "machine.json"
    ratio = Ratio("r", 0.9, 0.8, 1.0)

    def result(name: str) -> dict[str, object]:
        return {"machine": {}, "quick": True, "benchmarks": {name: asdict(Outcome(0, 1.0, [ratio]))}}

    suite._store(path, result("replay"))
    suite._store(path, result("learner"))
    assert stored_ratios(json.loads(path.read_text())) == {("replay", "r"): ratio, ("learner", "r"): ratio}


def test_a_benchmark_runs_through_the_suite_and_its_figures_are_in_one_file(tmp_path):
    command = [sys.executable, "-m", "benchmarks.suite", "--quick", "--only", "fuzz_decoder"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "bench.json")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: none; fallen: none" in done.stdout
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["benchmarks"]["fuzz_decoder"]["figures"]["messages"] > 0
    assert result["machine"]["cores"] > 0


@pytest.mark.slow
def test_processes_that_a_profiled_benchmark_spawns_find_their_functions(tmp_path):
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.profiled", "cprofile", str(tmp_path / "profile")]
    command += ["benchmarks.rollout_path", "--quick", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(target.read_text())["rows"]
    assert (tmp_path / "profile.pstats").stat().st_size > 0
