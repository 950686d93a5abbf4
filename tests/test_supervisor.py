"""Which roles are started again when they die, and when a run is given up: real processes, scripted roles."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.config import Config
from streamrl.observe.events import read_events
from streamrl.supervisor import Role, Supervisor

STEPS = 3
ROLE = """
import json, os, signal, sys, time
from pathlib import Path
from streamrl.observe.events import EventLog

name, events_path, run_folder, lives = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
lived = Path(run_folder) / f"{name}.lives"
number = int(lived.read_text()) if lived.exists() else 0
lived.write_text(str(number + 1))
life = lives[min(number, len(lives) - 1)]
events = EventLog(events_path, name)
if life.get("ready", True):
    events.emit("ready")
time.sleep(life.get("seconds", 0.3))
for step in range(life.get("steps", 0)):
    with events.span("learner.step", step=step):
        pass
    with open(run_folder / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": step + 1, "reward/mean": 0.0, "pass_rate": 0.0}) + "\\n")
if life["end"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif life["end"] == "failed":
    sys.exit(1)
elif life["end"] == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while not (run_folder / "over").exists():
        time.sleep(0.05)
else:
    (run_folder / "over").touch()
"""
WAITS, DIES, DONE = {"end": "waits"}, {"end": "killed"}, {"end": "done", "steps": STEPS}
DONE_LATE = DONE | {"seconds": 4}


@pytest.fixture
def supervise(tmp_path) -> Callable[..., tuple[int, Path]]:
    """`supervise(replay=, generator=, learner=)`: runs scripted lives of the roles; (exit code, run folder)."""

    def run(restarts: int = 3, **lives: list[dict]) -> tuple[int, Path]:
        config = Config.model_validate(
            {
                "run": {
                    "folder": tmp_path,
                    "steps": STEPS,
                    "restarts": restarts,
                    "start_timeout": 30,
                    "stop_timeout": 5,
                },
                "observe": {"console": False},
            }
        )
        folder = config.run_folder
        (folder / "events").mkdir(parents=True)
        (folder / "role.py").write_text(ROLE)
        supervisor = Supervisor(config, folder)
        for role in supervisor.roles:
            script(role, folder, lives.get(role.name.partition("-")[0], [WAITS]))
        return supervisor.run(), folder

    return run


def script(role: Role, folder: Path, lives: list[dict]) -> None:
    role.command = [
        sys.executable,
        str(folder / "role.py"),
        role.name,
        str(role.events),
        str(folder),
        json.dumps(lives),
    ]
    role.environment = {}


def starts(folder: Path, role: str) -> int:
    return sum(event["event"] == "process.start" for event in read_events(folder / "events" / f"{role}.jsonl"))


def test_a_run_without_deaths_ends_with_0(supervise):
    code, folder = supervise(learner=[DONE])
    assert (code, starts(folder, "learner-0")) == (0, 1)


def test_the_replay_service_is_started_again_when_it_is_killed(supervise):
    code, folder = supervise(replay=[DIES, DIES, WAITS], learner=[DONE_LATE])
    assert (code, starts(folder, "replay-0")) == (0, 3)


def test_the_learner_is_started_again_when_it_is_killed(supervise):
    code, folder = supervise(learner=[{"end": "killed", "steps": 1}, {"end": "killed", "steps": 1}, DONE])
    assert (code, starts(folder, "learner-0")) == (0, 3)


def test_a_learner_that_dies_twice_without_a_step_in_between_ends_the_run_with_its_log(supervise, capsys):
    code, folder = supervise(learner=[{"end": "killed", "steps": 1}, DIES, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 2)
    assert "learner-0 ended with signal SIGKILL; last lines of" in capsys.readouterr().err


def test_restarts_are_counted(supervise, capsys):
    code, folder = supervise(restarts=1, learner=[{"end": "killed", "steps": 1}, {"end": "killed", "steps": 1}, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 2)
    assert "learner-0 ended with" in capsys.readouterr().err


def test_a_role_that_never_was_ready_is_not_started_again(supervise, capsys):
    code, folder = supervise(learner=[{"end": "failed", "ready": False}, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 1)
    assert "learner-0 ended with exit code 1" in capsys.readouterr().err
