"""What is said of a run folder before it goes on."""

from __future__ import annotations

from pathlib import Path

from streamrl.observe.ending import resume_line
from streamrl.observe.events import EventLog, event_path


def begun(folder: Path, *saved: int, over: int | None = None) -> Path:
    """A run with these checkpoints; `over`: it came to its end at this step."""
    events = EventLog(event_path(folder, "replay"), "replay-0")
    if over is not None:
        events.emit("learner.finished", version=f"{over}.0")
        events.emit("replay.stop", code=0)
    events.close()
    for step in saved:
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


def test_a_new_folder_says_nothing(tmp_path: Path) -> None:
    assert resume_line(tmp_path / "new", 100) is None
    (tmp_path / "made" / "events").mkdir(parents=True)
    assert resume_line(tmp_path / "made", 100) is None


def test_an_interrupted_run_is_resumed_at_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", 20, 40)
    assert resume_line(folder, 100) == f"resumes {folder} at step 40 of 100"
    young = begun(tmp_path / "young")
    assert resume_line(young, 100) == f"resumes {young} at step 0 of 100: it has no checkpoint yet"


def test_a_finished_run_with_more_steps_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", 50, 100, over=100)
    assert resume_line(folder, 200) == f"{folder} was done at step 100, and goes on to step 200"


def test_a_run_that_lacks_its_end_alone_is_brought_to_it(tmp_path: Path) -> None:
    assert "brought to its end" in str(resume_line(begun(tmp_path / "x", 100), 100))
