"""A role on a cluster: who receives SIGTERM, what the exit code says, and what the scripts ask about a run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import folder, role
from launch.role import Role, visible
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.nodes import FurtherNodes, NodeRole
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.places import load_run
from streamrl.preflight.epochs import with_steps
from streamrl.run_folder import make
from streamrl.tasks.left_out import LeftOut
from tests.tasks.test_left_out import of_task

LISTENER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("{0}", "w").write("told"), sys.exit(0)))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
open("{0}.up", "w").close()
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two steps, none of them done."""
    path = tmp_path / "run"
    path.mkdir()
    config_file.save(
        Config.model_validate({"run": {"steps": 2, "name": "run", "folder": tmp_path}}), path / "config.yaml"
    )
    return path


def _do_steps(run: Path, steps: int) -> None:
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]  # what `Role` adds behind it are arguments that it does not read


def test_the_exit_code_says_whether_the_run_goes_on(run):
    done = _python("pass")
    assert Role(run, done, restarts=0, grace=5).run() == role.GOES_ON
    _do_steps(run, 2)
    assert Role(run, done, restarts=0, grace=5).run() == role.DONE
    assert Role(run, _python("raise SystemExit(2)"), restarts=3, grace=5).run() == role.REFUSED


def test_a_role_that_fails_is_started_again_as_often_as_allowed(run, monkeypatch):
    monkeypatch.setattr(role, "PAUSE", 0.0)
    count = _python(f"open({str(run / 'starts')!r}, 'a').write('x'); raise SystemExit(3)")
    assert Role(run, count, restarts=2, grace=5).run() == 3
    assert (run / "starts").read_text() == "xxx"


GIVES_UP = """
from pathlib import Path
from streamrl.observe.events import EventLog, event_path, read_events
open({0!r}, "a").write("x")
EventLog(event_path(Path({1!r}), "replay"), "replay-0").emit("gave_up", reason="no learner step in 5 s")
raise SystemExit(1)
"""


def test_a_role_of_a_run_that_was_given_up_is_not_started_again(run, monkeypatch, caplog):
    monkeypatch.setattr(role, "PAUSE", 0.0)
    events = EventLog(event_path(run, "learner"), "learner-0")
    events.emit("gave_up", reason="of a former start, since mended")
    events.close()
    gives_up = Role(run, _python(GIVES_UP.format(str(run / "starts"), str(run))), restarts=3, grace=5)
    assert gives_up.run() == 1
    assert (run / "starts").read_text() == "x"
    assert "not started again: no learner step in 5 s" in caplog.text


REFUSED = """
from pathlib import Path
from streamrl.observe.events import EventLog, event_path
open({0!r}, "a").write("x")
EventLog(event_path(Path({1!r}), "learner"), "learner-0").emit("learner.refused", reason="no checkpoint is left")
raise SystemExit(1)
"""


def test_a_learner_that_was_refused_ends_with_2_though_its_launcher_does_with_1(run, monkeypatch, caplog):
    monkeypatch.setattr(role, "PAUSE", 0.0)
    refused = _python(REFUSED.format(str(run / "starts"), str(run)))
    assert Role(run, [*refused, role.LAUNCHER], restarts=3, grace=5).run() == role.REFUSED
    assert (run / "starts").read_text() == "x"
    assert "not started again: no checkpoint is left" in caplog.text
    assert Role(run, refused, restarts=1, grace=5).run() == 1  # any other role may come again
    assert (run / "starts").read_text() == "xxx"


def test_a_replay_service_under_the_launcher_ends_with_1_after_the_time_without_progress(tmp_path):
    """The whole command of a cluster's script: started once, in spite of its three restarts."""
    config = Config.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "start_timeout": 0.1, "progress_timeout": 2.0},
            "replay": {"group_timeout": 1.0},
        }
    )
    path = tmp_path / "run"
    for name in ("events", "logs", "journal"):
        (path / name).mkdir(parents=True)
    config_file.save(config, path / "config.yaml")
    command = [sys.executable, "-m", "launch.role", "--run-folder", str(path), "--restarts", "3", "--"]
    command += [sys.executable, "-m", "streamrl.cli", "replay", "--run-folder", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "not started again: no learner step in run.progress_timeout=2 s: no learner is there" in done.stderr
    events = list(read_events(event_path(path, "replay")))
    assert sum(event["event"] == "process.start" for event in events) == 1


def test_sigterm_reaches_the_role_and_it_is_not_started_again(run):
    told = run / "told"
    command = ["--run-folder", str(run), "--restarts", "3", "--", *_python(LISTENER.format(told))]
    process = subprocess.Popen([sys.executable, "-m", "launch.role", *command])
    _until(run / "told.up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == role.GOES_ON
    assert told.read_text() == "told"


def test_the_ranks_are_told_and_not_their_launcher(run):
    told = run / "told"
    rank = _python(LISTENER.format(told))
    parent = subprocess.Popen(_python(f"import subprocess, sys; sys.exit(subprocess.run({rank!r}).returncode)"))
    _until(run / "told.up")
    role.signal_tree(parent.pid, to_children=True)
    assert parent.wait(60) == 0
    assert told.read_text() == "told"


def test_a_rank_that_dies_on_being_told_and_is_started_again_is_told_again(run):
    dying, told = run / "dying", run / "told"
    first, again = _python(LISTENER.format(dying).replace("sys.exit(0)", "sys.exit(1)")), _python(LISTENER.format(told))
    # One that is told before it listens hears it then.
    blocked = "import signal, subprocess as s; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    launcher = f"{blocked}; s.run({first!r}); all(iter(lambda: s.run({again!r}).returncode, 0))"
    command = ["--run-folder", str(run), "--grace", "15", "--", *_python(launcher), role.LAUNCHER]
    process = subprocess.Popen([sys.executable, "-m", "launch.role", *command])
    _until(run / "dying.up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == role.GOES_ON
    assert (dying.read_text(), told.read_text()) == ("told", "told")


def test_a_role_that_does_not_end_in_its_grace_time_is_killed(run):
    deaf = Role(
        run, _python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"), restarts=0, grace=0.2
    )
    handler = signal.signal(signal.SIGTERM, deaf.stop)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert deaf.run() == role.GOES_ON
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_signal_while_a_failed_role_is_started_again_reaches_the_new_process(run, monkeypatch):
    monkeypatch.setattr(role, "PAUSE", 0.0)
    start, commands = subprocess.Popen, [_python("raise SystemExit(3)"), _python("import time; time.sleep(20)")]

    def popen(*given, **named):
        made = start(commands.pop(0), **named)
        if not commands:
            os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(subprocess, "Popen", popen)
    failing = Role(run, [], restarts=1, grace=0.5)
    handler = signal.signal(signal.SIGTERM, failing.stop)
    began = time.monotonic()
    try:
        assert failing.run() == role.GOES_ON
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert time.monotonic() - began < 10


def test_gpus_are_positions_among_those_that_the_scheduler_left(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible("4,5") == "4,5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6")
    assert visible("1,2") == "3,6"
    with pytest.raises(SystemExit, match="GPUs 3 are not there: this process may use 3"):
        visible("3")


def test_a_run_is_complete_when_all_of_its_steps_have_their_row(run):
    assert not folder.is_complete(run)
    _do_steps(run, 1)
    assert not folder.is_complete(run)
    _do_steps(run, 2)
    assert folder.is_complete(run)


def test_a_role_is_ready_when_it_has_said_so_since_its_start(run):
    assert not folder.is_ready(run, "generator-3", since=0)
    events = EventLog(event_path(run, "generator", 3), "generator-3")
    events.emit("ready", server="http://127.0.0.1:1")
    events.close()
    assert folder.is_ready(run, "generator-3", since=time.time() - 60)
    assert not folder.is_ready(run, "generator-3", since=time.time() + 60)
    assert folder.is_ready(run, "generator-3-node-0", since=0), "the first node of a server is the worker's"
    assert not folder.is_ready(run, "generator-3-node-1", since=0)
    FurtherNodes(run, "server-3", 2).begin("127.0.0.1", 1, 0.0)
    node = NodeRole(run, "server-3", 1, 0.0)
    meeting = node.to_join(0.0)
    assert meeting is not None
    node.joined(meeting, 0.0)
    assert folder.is_ready(run, "generator-3-node-1", since=0)


def test_a_node_waits_for_the_folder_of_this_very_configuration(run, tmp_path):
    config = config_file.load(run / "config.yaml", ["run.start_timeout=0.2"])
    with pytest.raises(ConfigError, match=r"of another configuration, after run\.start_timeout=0\.2 s"):
        folder.wait(config)
    config_file.save(config, run / "config.yaml")
    assert folder.wait(config) == run


def test_a_node_waits_for_the_record_in_which_epochs_are_steps(tmp_path):
    words = ["model.dtype=float32", "run.epochs=2", f"run.folder={tmp_path}", "run.start_timeout=0.2"]
    config = config_file.load(None, words)
    made = make(with_steps(config, LeftOut(trained={"copy": of_task(size=80)})), fresh=False)
    assert load_run(made).run.steps == 20
    assert folder.wait(config) == made
    with pytest.raises(ConfigError, match="of another configuration"):
        folder.wait(config_file.load(None, [*words, "run.seed=7"]))


def test_keys_are_made_before_a_run_for_a_secret(tmp_path):
    folder.make_keys(tmp_path / "keys")
    names = {path.name for path in (tmp_path / "keys").iterdir()}
    assert names == {"service.key", "service.pub", "client.key", "client.pub", "api.key", "admin.key"}


def _until(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
