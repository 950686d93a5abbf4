"""The benchmark of enemies sends every kind, judges what is seen, and its quick form holds against the real service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.adversary import Flood
from benchmarks.adversary_kinds import SILENCE, every_kind, matches

FLOOD = Flood("f", "1 frame", memory=10, memory_bound=10, descriptors=3, descriptor_bound=3, steps=1)


def test_there_are_forty_kinds_each_with_a_name_of_its_own_and_something_to_see() -> None:
    kinds = list(every_kind())
    assert len(kinds) >= 40
    assert len({(kind.who, kind.name) for kind in kinds}) == len(kinds)
    assert {kind.who for kind in kinds} == {"stranger", "member", "worker", "answer"}
    for kind in kinds:
        assert re.compile(kind.expected)
        assert not matches(kind, "Traceback")
        assert not matches(kind, "TimeoutError: no ticket came")


def test_what_is_not_answered_is_told_from_what_is_accepted() -> None:
    silent = [kind for kind in every_kind() if matches(kind, SILENCE)]
    assert silent
    assert not any(matches(kind, "Accepted") for kind in every_kind())


@pytest.mark.parametrize("change", [{"memory": 11}, {"descriptors": 4}, {"steps": 0}])
def test_a_flood_beyond_a_bound_or_a_run_without_a_step_is_broken(change: dict[str, int]) -> None:
    assert FLOOD.holds
    assert not Flood(**{**{name: getattr(FLOOD, name) for name in FLOOD.__slots__}, **change}).holds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_form_breaks_nothing(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.adversary", "--quick", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "broken: nothing"
    figures = json.loads(target.read_text())
    assert len(figures["kinds"]) >= 40
    assert all(kind["holds"] for kind in figures["kinds"])
    assert figures["verdicts"].keys() == {"run", "network"}
