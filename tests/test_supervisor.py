"""Which roles are started again when they die, and when a run is given up: real processes, scripted roles."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.config import Config
from streamrl.observe import console
from streamrl.observe.events import EventLog, read_events
from streamrl.observe.unwritten import settle
from streamrl.role_process import Role
from streamrl.sft.supervisor import RowsSupervisor
from streamrl.supervisor import Supervisor
from tests.operations_table import GOES_ON, documented

STEPS = 3
ROLE = """
import json, os, signal, sys, time
from pathlib import Path
from streamrl.observe.events import EventLog

if '"deaf"' in sys.argv[4]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
name, events_path, run_folder, lives = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
lived = Path(run_folder) / f"{name}.lives"
number = int(lived.read_text()) if lived.exists() else 0
lived.write_text(str(number + 1))
(run_folder / f"{name}.pid").write_text(str(os.getpid()))
life = lives[min(number, len(lives) - 1)]
if life["end"] == "waits" and not life.get("deaf"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(life.get("waits first", 0.0))
if "says" in life:
    print(life["says"], flush=True)
events = EventLog(events_path, name)
for event, fields in life.get("tells", {}).items():
    events.emit(event, **fields)
if life.get("ready", True):
    events.emit("ready")
for path, content in life.get("leaves", {}).items():
    (run_folder / path).parent.mkdir(exist_ok=True)
    (run_folder / path).write_text(content)
time.sleep(life.get("seconds", 0.3))
if "awaits" in life:  # another role's start
    other, start = life["awaits"]
    started = run_folder / f"{other}.lives"
    while not started.exists() or started.read_text() != str(start):
        time.sleep(0.05)
if "outlives" in life:  # also in the eyes of the supervisor
    other = run_folder / f"{life['outlives']}.pid"
    while not other.exists() or Path("/proc", other.read_text()).exists():
        time.sleep(0.05)
if "fails at" in life:
    try:
        with events.span("learner.step", step=life["fails at"]):
            raise ValueError("a micro batch of group 1")
    except ValueError:
        sys.exit(1)
for step in range(life.get("steps", 0)):
    with events.span("learner.step", step=step):
        pass
    with open(run_folder / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": step + 1, "reward/mean": 0.0, "pass_rate": 0.0}) + "\\n")
while life.get("deaf"):
    time.sleep(1)
if life["end"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif life["end"] == "failed":
    sys.exit(1)
elif life["end"] == "waits":
    while not (run_folder / "over").exists():
        time.sleep(0.05)
elif life["end"] == "well":
    pass
else:
    (run_folder / "over").touch()
"""
WAITS, DIES, DONE = {"end": "waits"}, {"end": "killed"}, {"end": "done", "steps": STEPS}


@pytest.fixture
def supervise(tmp_path) -> Callable[..., tuple[int, Path]]:
    """`supervise(replay=, generator=, learner=)`: runs scripted lives of the roles; (exit code, run folder)."""

    def run(
        restarts: int = 3, start_timeout: float = 600, stop_timeout: float = 5, workers: int = 1, rows: bool = False,
        **lives: list[dict],
    ) -> tuple[int, Path]:  # fmt: skip
        config = Config.model_validate(
            {
                "run": {
                    "folder": tmp_path,
                    "steps": STEPS,
                    "restarts": restarts,
                    "start_timeout": start_timeout,
                    "stop_timeout": stop_timeout,
                },
                "generate": {"workers": workers},
                "observe": {"console": False},
            }
        )
        folder = config.run_folder
        (folder / "events").mkdir(parents=True, exist_ok=True)
        (folder / "role.py").write_text(ROLE)
        supervisor = RowsSupervisor(config, folder, Path("sft.yaml")) if rows else Supervisor(config, folder)
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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_ends_as_it_would(stream, supervise, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(console, "LINE_EVERY", 0.1)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, stream, unread)
        code, folder = supervise(learner=[DONE if stream == "stdout" else DONE | {"steps": 2}])
    assert code == (0 if stream == "stdout" else 1)
    assert (folder / "events.jsonl").exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_output_has_no_room_goes_on_and_ends_as_it_would(stream, supervise, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY", 0.1)
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, stream, full)
    code, folder = supervise(learner=[DONE if stream == "stdout" else DONE | {"steps": 2}])
    assert code == (0 if stream == "stdout" else 1)
    assert (folder / "events.jsonl").exists()
    settle()
    full.close()  # it holds nothing back


def test_a_signal_while_the_others_end_makes_no_interrupted_run_of_a_complete_one(supervise, monkeypatch, capsys):
    stop = Supervisor._stop

    def interrupted(supervisor: Supervisor, *, ask: bool) -> None:
        supervisor.interrupt()
        stop(supervisor, ask=ask)

    monkeypatch.setattr(Supervisor, "_stop", interrupted)
    code, _ = supervise(learner=[DONE])
    said = capsys.readouterr()
    assert code == 0
    assert "interrupted" not in said.err


def test_a_full_disk_at_the_end_does_not_change_how_the_run_ended(supervise, tmp_path, caplog):
    draft = tmp_path / Config().run.name / f".events.jsonl.{os.getpid()}"
    draft.parent.mkdir()
    draft.symlink_to("/dev/full")
    code, folder = supervise(learner=[DONE])
    assert code == 0
    assert f"{folder}/events.jsonl was not written: [Errno 28]" in caplog.text
    assert not draft.is_symlink()


def test_of_a_run_that_is_complete_nothing_is_started_while_its_last_checkpoint_is_there(supervise, capsys):
    over = WAITS | {"tells": {"learner.finished": {"version": f"{STEPS}.0"}, "replay.stop": {"code": 0}}}
    code, folder = supervise(replay=[over], learner=[DONE])
    assert code == 0
    (folder / "checkpoints" / f"step_{STEPS}").mkdir(parents=True)
    (folder / "checkpoints" / "step_of_mine_2").mkdir()  # a user's copy
    assert supervise(replay=[over], learner=[DONE]) == (0, folder)
    assert f"all {STEPS} steps are done, nothing is started" in capsys.readouterr().err
    assert starts(folder, "learner-0") == 1
    (folder / "checkpoints" / f"step_{STEPS}").rename(folder / "checkpoints" / f"step_{STEPS - 1}")
    supervise(replay=[over], learner=[DONE])
    assert starts(folder, "learner-0") == 2


def test_the_replay_service_is_started_again_when_it_is_killed(supervise):
    code, folder = supervise(replay=[DIES, DIES, WAITS], learner=[DONE | {"awaits": ["replay-0", 3]}])
    assert (code, starts(folder, "replay-0")) == (0, 3)


def test_the_learner_is_started_again_when_it_is_killed(supervise):
    code, folder = supervise(learner=[{"end": "killed", "steps": 1}, {"end": "killed", "steps": 1}, DONE])
    assert (code, starts(folder, "learner-0")) == (0, 3)


def test_a_learner_that_dies_twice_without_a_step_in_between_ends_the_run_with_its_log(supervise, capsys):
    code, folder = supervise(learner=[{"end": "killed", "steps": 1}, DIES, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 2)
    documented("learner-0 ended with signal ...; last lines of ...", capsys.readouterr().err, code)


def test_restarts_are_counted(supervise, capsys):
    code, folder = supervise(restarts=1, learner=[{"end": "killed", "steps": 1}, {"end": "killed", "steps": 1}, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 2)
    assert "learner-0 ended with" in capsys.readouterr().err


def test_a_role_that_dies_is_started_again_and_the_log_says_so(supervise, caplog):
    code, _ = supervise(generator=[DIES, WAITS], learner=[DONE | {"awaits": ["generator-0", 2]}])
    assert code == 0
    documented("... ended with ..., and is started again (...)", caplog.text, GOES_ON)


def test_a_role_that_never_was_ready_is_not_started_again(supervise, capsys):
    code, folder = supervise(learner=[{"end": "failed", "ready": False}, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 1)
    documented("... ended with exit code ...; last lines of ...", capsys.readouterr().err, code)


def test_a_role_that_is_not_ready_in_time_ends_the_run(supervise, capsys):
    code, _ = supervise(start_timeout=2, replay=[WAITS | {"ready": False}])
    documented("... was not ready in run.start_timeout=... s; last lines of ...", capsys.readouterr().err, code)


def test_a_replay_service_that_a_signal_ends_before_it_is_ready_ends_the_run(supervise, capsys):
    code, folder = supervise(replay=[{"end": "well", "ready": False}])
    documented("... ended before it was ready; last lines of ...", capsys.readouterr().err, code)
    assert not (folder / "generator-0.pid").exists()


def test_a_clock_that_is_set_while_the_run_goes_on_changes_nothing(supervise, monkeypatch):
    """The roles' events have times of before the jumps; the supervisor reads what was told since the start."""
    clock, looks = time.time, itertools.count(1)
    monkeypatch.setattr("time.time", lambda: clock() + 3600 * next(looks))
    code, folder = supervise(learner=[{"end": "killed", "steps": 1}, DONE])
    assert (code, starts(folder, "learner-0")) == (0, 2)


def test_what_a_former_run_has_told_is_not_told_by_this_one(supervise, capsys, tmp_path):
    events = EventLog(tmp_path / "run" / "events" / "replay-0.jsonl", "replay-0")
    events.emit("ready")
    events.close()
    code, _ = supervise(start_timeout=2, replay=[WAITS | {"ready": False}])
    assert (code, "replay-0 was not ready" in capsys.readouterr().err) == (1, True)


def test_a_reason_to_give_up_is_the_runs_last_line_and_nothing_is_started_again(supervise, capsys):
    code, folder = supervise(replay=[{"end": "failed", "tells": {"gave_up": {"reason": "no learner step in 5 s"}}}])
    assert (code, starts(folder, "replay-0")) == (1, 1)
    assert capsys.readouterr().err.splitlines() == ["streamrl: no learner step in 5 s"]


FRAME = "Traceback\n" + "of torchrun\n" * 30 + "ChildFailedError: rank 0 exited with 2"


def test_what_the_learner_refuses_is_the_last_line_and_exit_code_2_though_torchrun_ends_with_1(supervise, capsys):
    says = f"INFO building\nstreamrl: model.path: a.safetensors is missing\nstreamrl: the same of rank 1\n{FRAME}"
    code, _ = supervise(learner=[{"end": "failed", "ready": False, "says": says}])
    assert code == 2
    assert capsys.readouterr().err.splitlines() == ["streamrl: model.path: a.safetensors is missing"]


def test_what_the_learner_failed_of_is_the_last_line_and_not_torchruns_frame(supervise, capsys):
    says = f"streamrl failed: IndexError: 7 is out of range\nstreamrl failed: RuntimeError: peer is gone\n{FRAME}"
    code, folder = supervise(learner=[{"end": "failed", "ready": False, "says": says}])
    seen = capsys.readouterr().err
    assert seen.splitlines() == [
        f"streamrl: learner-0 ended with exit code 1: IndexError: 7 is out of range; see {folder}/logs/learner-0.log"
    ]
    documented("learner-0 ended with exit code 1: ...; see ...", seen, code)


def test_the_learners_refusal_explains_a_server_that_fails_over_the_same_folder_first(supervise, capsys):
    says = "streamrl: model.path: a.safetensors is missing"
    learner = {"end": "failed", "ready": False, "says": says, "waits first": 2.0}
    code, _ = supervise(generator=[{"end": "failed", "ready": False, "seconds": 0.0}], learner=[learner])
    assert (code, capsys.readouterr().err.splitlines()) == (2, [says])


def test_a_step_that_failed_is_no_step(supervise, capsys):
    code, folder = supervise(learner=[DIES, {"end": "failed", "fails at": 0}, DONE])
    assert (code, starts(folder, "learner-0")) == (1, 2)


def blames(groups: list[int]) -> dict:
    """A learner in whose hands a micro batch of these groups fails."""
    blame = {"quarantine/blame_0_0.json": json.dumps({"step": 0, "groups": [[group, 0] for group in groups]})}
    return {"end": "failed", "fails at": 0, "leaves": blame}


def test_a_learner_that_finds_out_which_group_fails_in_its_hands_is_started_again_until_it_is_left_out(supervise):
    """No restart is left for anything else, and no step comes in between."""
    kept = {"quarantine/group_1_0.bin": "the group"}
    lives = [blames([0, 1, 2]), blames([1]), DONE | {"leaves": kept}]
    code, folder = supervise(restarts=0, learner=lives)
    assert (code, starts(folder, "learner-0")) == (0, 3)


def test_a_learner_that_finds_out_the_same_again_only_dies_again(supervise):
    code, folder = supervise(learner=[blames([1]), blames([1]), blames([1]), blames([1]), DONE])
    assert (code, starts(folder, "learner-0")) == (1, 3)


FINISHED = {"learner.finished": {"version": f"{STEPS}.0"}}


def test_a_learner_that_is_killed_when_the_service_knows_its_end_does_not_fail_the_run(supervise):
    replay = {"end": "well", "tells": FINISHED | {"replay.stop": {"code": 0}}, "outlives": "learner-0"}
    code, folder = supervise(replay=[replay], learner=[{"end": "killed", "steps": STEPS}], generator=[WAITS])
    assert (code, starts(folder, "learner-0")) == (0, 1)


def test_a_service_that_dies_when_the_learner_has_finished_and_gone_does_not_fail_the_run(supervise):
    replay = {"end": "killed", "tells": FINISHED, "outlives": "learner-0"}
    code, folder = supervise(replay=[replay], learner=[{"end": "killed", "steps": STEPS}])
    assert (code, starts(folder, "replay-0"), starts(folder, "learner-0")) == (0, 1, 1)


def test_an_exit_that_was_asked_for_ends_with_0_and_says_how_to_go_on(supervise, capsys):
    reason = "run.exit_interval=2 divides step 2"
    told = {"learner.exited": {"version": "2.0", "reason": reason}, "replay.stop": {"code": 0}}
    replay = {"end": "well", "tells": told, "seconds": 2}
    code, folder = supervise(replay=[replay], learner=[{"end": "done", "steps": 2}])
    said = capsys.readouterr().err
    documented("not complete: ...; this resumes the run: ...", said, code)
    assert f"streamrl: not complete: {reason}; this resumes the run: " in said
    assert starts(folder, "learner-0") == 1
    code, _ = supervise(replay=[WAITS], learner=[{"end": "done", "steps": 2}])
    assert code == 1, "nobody asked the next start to end there"
    said = capsys.readouterr().err
    documented("ended at step ... of ...; last lines of ...", said, code)
    assert "learner-0.log" in said


def test_ctrl_c_is_answered_while_hundreds_of_roles_are_being_started(supervise, monkeypatch, capsys):
    """The third start is interrupted: none of the others comes."""
    start, started = Role.start, []

    def slowly(role: Role) -> None:
        start(role)
        started.append(role.name)
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Role, "start", slowly)
    code, _ = supervise(workers=40)
    assert started == ["replay-0", "generator-0", "generator-1"]
    documented("interrupted; this resumes the run: ...", capsys.readouterr().err, code)


@pytest.mark.parametrize("rows", [True, False])
def test_a_learner_that_no_service_can_tell_is_told_to_save_and_end(rows, supervise, tmp_path, capsys):
    """There is none with rows alone; or it is started again, and reads its journal."""

    def interrupted() -> None:
        deadline = time.monotonic() + 60
        lives, awaited = ("learner-0", "1") if rows else ("replay-0", "2")
        folder = tmp_path / Config().run.name
        while not _is_ready(folder, "learner-0") or (folder / f"{lives}.lives").read_text() != awaited:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupted, daemon=True).start()
    replay = [DIES | {"seconds": 3}, WAITS | {"waits first": 600}]
    code, folder = supervise(rows=rows, stop_timeout=600, replay=replay, learner=[WAITS])
    documented("interrupted; this resumes the run: ...", capsys.readouterr().err, code)
    assert (folder / "learner-0.lives").read_text() == "1"


def test_a_learner_that_has_not_saved_in_its_time_is_killed_and_the_line_says_that_nothing_was(
    supervise, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("streamrl.supervisor.KILL_GRACE", 0.5)

    def interrupted() -> None:
        deadline = time.monotonic() + 60
        while not _is_ready(tmp_path / Config().run.name, "learner-0"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupted, daemon=True).start()
    code, _ = supervise(stop_timeout=1, learner=[WAITS | {"deaf": True}])
    documented("interrupted before a checkpoint was saved; last lines of ...", capsys.readouterr().err, code)


def _is_ready(folder: Path, role: str) -> bool:
    path = folder / "events" / f"{role}.jsonl"
    return path.exists() and any(event["event"] == "ready" for event in read_events(path))


def test_a_role_still_starting_at_ctrl_c_that_gets_no_signal_is_not_waited_for(supervise, monkeypatch, capsys):
    monkeypatch.setattr("streamrl.supervisor.KILL_GRACE", 0.5)
    deaf = WAITS | {"ready": False, "deaf": True}
    start = Role.start

    def interrupted(role: Role) -> None:
        start(role)
        if role.name == "learner-0":
            deadline = time.monotonic() + 30
            while not list(role.log.parents[1].glob("generator-0.lives")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Role, "start", interrupted)
    code, _ = supervise(stop_timeout=600, generator=[deaf], learner=[WAITS | {"ready": False}])
    assert code == 130
    assert "was killed" not in capsys.readouterr().err
