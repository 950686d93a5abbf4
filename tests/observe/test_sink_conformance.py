"""Every sink passes what a user's own must pass; and one that breaks a promise does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.choices import SINKS
from streamrl.observe.sinks.base import Sink, numbers
from streamrl.testing.sinks import SinkConformance


class TestTensorBoard(SinkConformance):
    name = "tensorboard"
    test_every_process_can_load_it_without_torch = None  # in tests/test_own_choices.py, all at once

    def read(self, run_folder: Path) -> dict[str, dict[int, float]]:
        read = EventAccumulator(str(run_folder / "tensorboard"))
        read.Reload()
        names = read.Tags()["scalars"]
        return {name: {scalar.step: scalar.value for scalar in read.Scalars(name)} for name in names}


def test_wandb_passes_in_a_process_of_its_own(tmp_path):
    script = f"""
from pathlib import Path
from streamrl.testing.sinks import SinkConformance
kit = SinkConformance()
kit.name, kit.settings = "wandb", {{"wandb": "offline"}}
kit.test_it_says_in_a_line_what_it_is()
kit.test_every_number_of_a_run_that_was_resumed_is_there(Path({str(tmp_path)!r}))
kit.test_it_is_opened_once(Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    assert set(SINKS.names) == {"tensorboard", "wandb"}


class Late(Sink):
    """Leaves out what was evaluated later, and every row of a step that was trained again."""

    def write(self, step, row):
        path = self.run_folder / f"{step}.json"
        if not path.exists():
            path.write_text(json.dumps(numbers(row)))

    def close(self):
        pass


class TheRowsOfLate(SinkConformance):
    """The kit with what `Late` has written."""

    name = f"{__file__}:Late"

    def read(self, run_folder):
        written: dict[str, dict[int, float]] = {"eval/step": {2: 2.0}}
        for path in run_folder.glob("*.json"):
            for name, value in json.loads(path.read_text()).items():
                written.setdefault(name, {})[int(path.stem)] = value
        return written


def test_one_that_breaks_a_promise_is_found_out(tmp_path):
    with pytest.raises(AssertionError):
        TheRowsOfLate().test_every_number_of_a_run_that_was_resumed_is_there(tmp_path)


class Forgetful(Late):
    """Writes every row, and forgets none."""

    def write(self, step, row):
        path = self.run_folder / f"{step}.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | numbers(row)))

    def truncate_after(self, step):
        """It says that it does."""


class TheRowsOfForgetful(TheRowsOfLate):
    """The kit with what `Forgetful` has written."""

    name = f"{__file__}:Forgetful"


def test_one_that_does_not_forget_what_no_resume_has_made_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match="leaves step 7"):
        TheRowsOfForgetful().test_every_number_of_a_run_that_was_resumed_is_there(tmp_path)
