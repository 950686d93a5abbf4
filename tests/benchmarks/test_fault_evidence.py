"""What the fault benchmark reads out of a real run's events: the history that it judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.fault_evidence import delivered, judge_run
from benchmarks.fault_scenarios import Outcome
from benchmarks.faults import Verdict
from streamrl.config import Config
from streamrl.types import Ledger

CONFIG = Config.model_validate({"task": {"name": "copy"}, "replay": {"groups_per_step": 2, "max_staleness": 2}})


class Story:
    """A run folder in which things happen one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._time = 0.0
        (folder / "events").mkdir()

    def emit(self, role: str, event: str, **fields: Any) -> None:
        self._time += 1
        line = {"time": self._time, "role": f"{role}-0", "event": event, **fields}
        with (self.folder / "events" / f"{role}-0.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start(self, version: str) -> None:
        self.emit("learner", "ready", version=version)

    def train(self, step: int, ids: Sequence[int], prompts: Sequence[int] | None = None) -> None:
        for group_id, prompt in zip(ids, prompts or ids, strict=True):
            self.emit("generator", "group", phase="end", group_id=group_id, prompt_index=prompt)
        self.emit("replay", "batch", step=step, group_ids=list(ids))
        self.emit("learner", "learner.step", phase="end", step=step)

    def end(self, steps: int, staleness: int = 2) -> Verdict:
        """The verdict, with a last checkpoint of so many steps and a metrics row for each."""
        rows = [{"step": step + 1, "staleness/max": min(step, staleness)} for step in range(steps)]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ledger = Ledger(below=2 * steps, cursors={"copy": 2 * steps})
        for name, content in ((f"step_{steps}", ledger), (f"step_{steps + 9}.damaged", Ledger(below=99))):
            (self.folder / "checkpoints" / name).mkdir(parents=True)
            description = {"version": f"{steps}.0", "ledger": msgspec.to_builtins(content, str_keys=True)}
            (self.folder / "checkpoints" / name / "checkpoint.json").write_text(json.dumps(description))
        return judge_run(self.folder, CONFIG, [])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_steps_behind_the_checkpoint_of_a_restart_are_replaced_by_those_that_were_trained_again(story: Story) -> None:
    story.start("0.0")
    story.train(0, [0, 1])
    story.train(1, [2, 3])
    story.start("1.1")
    story.train(1, [2, 3])
    story.train(2, [4, 5])
    found = story.end(steps=3)
    assert found.holds
    assert (found.steps, found.again, found.compared, found.staleness) == (3, 1, 1, 2)
    assert delivered(story.folder, 1) == [2, 3]


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (lambda story: story.train(1, [2, 4]), "lost"),
        (lambda story: story.train(1, [2, 0]), "twice"),
        (lambda story: story.train(1, [2, 3], [2, 1]), "twice"),  # another group with the same prompt
        (lambda story: story.train(1, [3, 2]), "reordered"),
    ],
)
def test_what_is_wrong_with_the_history_is_found(story: Story, break_it: Callable[[Story], None], what: str) -> None:
    story.start("0.0")
    story.train(0, [0, 1])
    break_it(story)
    assert getattr(story.end(steps=2), what) > 0


def test_a_token_beyond_the_bound_is_found(story: Story) -> None:
    story.start("0.0")
    for step in range(4):
        story.train(step, [2 * step, 2 * step + 1])
    assert story.end(steps=4, staleness=3).broken == 1


def test_a_scenario_holds_only_where_it_was_forced_and_the_run_completed() -> None:
    whole = Outcome("frames", Verdict(steps=40), forced=1, code=0, step=40, steps=40, audit="left out")
    assert whole.holds
    assert "lost 0, trained twice 0, reordered 0, bound unbroken" in str(whole)
    for change in (
        {"forced": 0},
        {"code": 1},
        {"step": 39},
        {"audit": "BROKEN"},
        {"verdict": Verdict(lost=1, steps=40)},
    ):
        assert not replace(whole, **change).holds
