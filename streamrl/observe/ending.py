"""How a run ended, by what its replay service has recorded, what it has saved, and where it would go on.

A run of `streamrl sft` has no service: its learner says itself that it has finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from streamrl.observe.events import event_path, read_events, role_events
from streamrl.types import PolicyVersion

MODEL = "model"  # in the run folder, once the run is complete: the trained model as a Hugging Face folder
ADAPTER = "adapter"  # beside it, of a run with adapters: these alone, as a PEFT folder


def saved_steps(run_folder: Path) -> list[int]:
    """The steps of its complete checkpoints, ascending."""
    names = (path.name.removeprefix("step_") for path in (run_folder / "checkpoints").glob("step_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def saved_model(run_folder: Path) -> PolicyVersion | None:
    """The version whose weights are in RUN/model; None where there is no such model."""
    for path in sorted((run_folder / MODEL).glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                version = (file.metadata() or {}).get("version")
        except (OSError, SafetensorError):
            return None
        return None if version is None else PolicyVersion.parse(version)
    return None


def is_last_step(event: dict[str, Any], steps: int) -> bool:
    """Does this event say that the learner has finished a run of so many steps?

    The learner says so when its last checkpoint is complete on disk: nothing of the run depends on it any more.
    """
    return event["event"] == "learner.finished" and int(str(event["version"]).partition(".")[0]) >= steps


def is_over(run_folder: Path, steps: int) -> bool:
    """Has the replay service, or a learner without one, recorded the end of a complete run, and nothing since?"""
    path = event_path(run_folder, "replay")
    if path.exists():
        return _is_over(read_events(path), steps)
    return _has_finished(role_events(run_folder, "learner"), steps)


def has_exited(run_folder: Path) -> bool:
    """Has the replay service recorded, since its start, that the learner ended before its last step, in good order?"""
    exited = False
    for event in role_events(run_folder, "replay"):
        exited = event["event"] == "learner.exited" or (exited and event["event"] != "process.start")
    return exited


def resume_line(run_folder: Path, steps: int) -> str | None:
    """What `train` does with a run folder, in one line; None for one in which no run has begun.

    Example: `resumes runs/quick at step 40 of 100`.
    """
    if not any(event_path(run_folder, role).exists() for role in ("replay", "learner")):
        return None
    saved = max(saved_steps(run_folder), default=0)
    if saved >= steps:
        return f"{run_folder} has its last checkpoint, of step {saved}, and not its end: it is brought to its end"
    if not saved:
        return f"resumes {run_folder} at step 0 of {steps}: it has no checkpoint yet"
    if is_over(run_folder, saved):
        return f"{run_folder} was done at step {saved}, and goes on to step {steps}"
    return f"resumes {run_folder} at step {saved} of {steps}"


def _has_finished(events: Iterable[dict[str, Any]], steps: int) -> bool:
    finished = False
    for event in events:
        finished = event["event"] != "process.start" and (finished or is_last_step(event, steps))
    return finished


def _is_over(events: Iterable[dict[str, Any]], steps: int) -> bool:
    finished = ended = False
    for event in events:
        if event["event"] == "process.start":
            finished = ended = False
        finished = finished or is_last_step(event, steps)
        ended = ended or (finished and event["event"] == "replay.stop" and event["code"] == 0)
    return ended
