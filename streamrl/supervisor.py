"""The supervisor: starts the roles of a run on one machine, watches them, ends all of its own children.

    replay service ──ready──▶ reward models + generator workers + learner ranks ──▶ console until the learner is done

Every role runs in a session of its own, writes RUN/logs/ROLE-N.log, and watches the supervisor's process:
whatever ends the supervisor, kill -9 included, ends them. A stop begins at the replay service, which tells
everyone; the learner then saves a checkpoint. A role that has not ended `run.stop_timeout` later is killed; one
that was still starting has nothing to save, and is not waited for as long.

A role that was ready and dies is started again, as often as `run.restarts` and `generate.restarts` allow: the
service recovers from its journal, the learner from its checkpoint, and a worker's tickets are issued again. Whether
the run makes progress is for the roles to watch (`streamrl/progress.py`), here as on a cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from streamrl.config import Config
from streamrl.device_map import device_map
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.learner_environment import learner_environment
from streamrl.lifeline import end_tree, exit_text
from streamrl.next_commands import closing_lines, interrupted_line
from streamrl.observe import events
from streamrl.observe.console import Console
from streamrl.observe.ending import is_last_step, is_over, resume_line, saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.observe.prometheus import Exporter
from streamrl.observe.summary import print_summary
from streamrl.observe.terminal import say
from streamrl.places import train_again
from streamrl.role_process import Role
from streamrl.stream.address import address_path
from streamrl.torchrun import rank_environment, torchrun

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at the roles; a person sees a dead role at once
KILL_GRACE = 15.0  # seconds between SIGTERM and SIGKILL of what is late: a worker ends its server first, 10 s on CUDA

# Seconds that a learner which is starting has to refuse what a server has failed over: of a model folder that is not
# whole, it says in one line what SGLang says in twenty.
LEARNER_FIRST = 30.0


class RoleFailed(RuntimeError):
    """A role ended, or did not start, in a way that ends the run; the text is its reason, or quotes its log."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code  # of the whole command: 2 where the configuration was refused


class Supervisor:
    """`streamrl train`: one run from start, or resume, to its end."""

    def __init__(self, config: Config, run_folder: Path, gpus: Sequence[str] | None = None) -> None:
        """Make the roles, and start none. `gpus` by the names of CUDA_VISIBLE_DEVICES; None: those of this machine."""
        self.config = config
        self.run_folder = run_folder
        self.replay = self._role("replay", [])
        self.generators = [self._role("generator", ["--index", str(index)], index) for index in range(config.workers)]
        processes = range(config.reward_model.processes)
        self.reward_models = [self._role("reward-model", ["--index", str(index)], index) for index in processes]
        for role in self.reward_models:
            role.environment["OMP_NUM_THREADS"] = str(config.reward_model.threads)
        self.learner = self._learner()
        if gpus is None:
            gpus = visible_gpus() if has_cuda() else ()
        if gpus:
            self._hand_out(gpus)
        self.interrupts = 0
        self.exited: str | None = None  # why the learner has ended before its last step, in good order
        self.failure: str | None = None  # why `run` has returned another code than 0 and 130
        self._blamed: set[tuple[str, bytes]] = set()  # what the learners before have found out of groups that fail
        self._finished = False

    @property
    def roles(self) -> list[Role]:
        return [self.replay, *self.reward_models, *self.generators, self.learner]

    def run(self) -> int:
        """Run to the end. Returns the exit code: 0 done, or `exited`, 1 failed, 130 interrupted after a checkpoint."""
        if self.is_complete():
            print_summary(self.config, self.run_folder)
            self._print_closing_lines()
            steps = self.config.run.steps
            say(
                f"streamrl: all {steps} steps are done, nothing is started; run.steps above {steps} goes on with "
                f"{self.run_folder}"
            )
            return 0
        if (line := resume_line(self.run_folder, self.config.run.steps)) is not None:
            say(f"streamrl: {line}")
        with contextlib.ExitStack() as ending:  # the last one first, whatever becomes of the others
            ending.callback(self._merge_events)
            ending.callback(self._listen_no_more, self._listen())
            if (exporter := Exporter.of(self.config, self.run_folder)) is not None:
                ending.callback(exporter.close)
            console = Console(self.config, self.run_folder)
            ending.callback(console.close)
            ending.callback(self._kill)
            try:
                self._start(console)
                self._watch(console)
                self._stop(ask=bool(self.interrupts))
                is_complete = self._judge()
            except RoleFailed as failure:
                self.failure = str(failure)
                console.close()
                say(f"streamrl: {failure}")
                self._stop(ask=True)
                return failure.code
        if not is_complete:
            self._print_how_to_go_on()
            return 130 if self.interrupts else 0
        console.summary()
        self._print_closing_lines()
        return 0

    def _merge_events(self) -> None:
        try:
            events.merge(self.run_folder)
        except OSError as error:  # the disk is full: the run has ended as it has, and its own logs are there
            log.error("%s/events.jsonl was not written: %s", self.run_folder, error)

    def is_complete(self) -> bool:
        """Whether the run has come to its end before, and its last checkpoint is there: then nothing is started."""
        steps = self.config.run.steps
        return max(saved_steps(self.run_folder), default=0) >= steps and is_over(self.run_folder, steps)

    def _print_how_to_go_on(self) -> None:
        if (line := interrupted_line(self.run_folder)) is not None:
            say(f"streamrl: {line}")
        why = "interrupted" if self.interrupts else f"not complete: {self.exited}"
        again = train_again(self.config, self.run_folder)
        say(f"streamrl: {why}; this resumes the run: {again}")

    def _print_closing_lines(self) -> None:
        say("\n" + "\n".join(closing_lines(self.config, self.run_folder)), sys.stdout)

    def _start(self, console: Console) -> None:
        """Start the replay service and, when it listens, the others."""
        for path in (address_path(self.run_folder), *self.run_folder.glob("reward-model-*.address")):
            path.unlink(missing_ok=True)  # of a former start
        self._new_blames()
        self.replay.start()
        while not self.interrupts and not self.replay.is_ready():
            self._check(self.replay)
            if self.replay.exit_code == 0 and not self.replay.is_ready():  # a signal has reached it alone
                raise RoleFailed(f"{self.replay.name} ended before it was ready; {self._log_tail(self.replay)}")
            console.refresh()
            time.sleep(POLL)
        for role in (*self.reward_models, *self.generators, self.learner):
            if self.interrupts:  # of hundreds, on a busy machine, the last is started a minute after the first
                return
            role.start()

    def _watch(self, console: Console) -> None:
        """Until the learner is done or a signal came: report late roles, restart dead ones."""
        if self.learner.process is None:
            return
        while not self.interrupts and not self._is_over():
            for role in self.roles:
                self._check(role)
            console.refresh()
            time.sleep(POLL)

    def _is_over(self) -> bool:
        """The learner has ended well, or died on its way out when the service knew that it had finished."""
        if self.learner.exit_code == 0:
            return True
        return self.learner.exit_code is not None and self._has_finished() and self.replay.exit_code is not None

    def _has_finished(self) -> bool:
        """Does the service know that the learner has come to the end of the run, or to an exit that was asked for?"""
        event, exited = self.replay.event("learner.finished"), self.replay.event("learner.exited")
        if exited is not None:
            self.exited = str(exited["reason"])
        self._finished = self._finished or (event is not None and is_last_step(event, self.config.run.steps))
        return self._finished or self.exited is not None

    def _check(self, role: Role) -> None:
        """Raise RoleFailed for a role that has failed or is late; start one again that may be."""
        code = role.exit_code
        if code is None:
            if role.age > self.config.run.start_timeout and not role.is_ready():
                raise RoleFailed(
                    f"{role.name} was not ready in run.start_timeout={self.config.run.start_timeout:g} s; "
                    f"{self._log_tail(role)}"
                )
            return
        if code == 0 or (self._has_finished() and self.learner.exit_code is not None):
            return
        if reason := role.given_up():
            raise RoleFailed(reason)
        word = role.last_word()
        if word is not None and word.code == 2:
            raise RoleFailed(word.reason, code=2)
        why = f"{role.name} ended with {exit_text(code)}" + (f": {word.reason}" if word else "")
        if role.is_ready() and self._may_restart(role):
            log.warning("%s, and is started again (%d)", why, role.restarts)
            role.start()
            return
        if role in self.generators and not role.is_ready():
            self._await_learner_refusal()
        if word is None:
            raise RoleFailed(f"{why}; {self._log_tail(role)}")
        raise RoleFailed(f"{why}; see {role.log}")

    def _await_learner_refusal(self) -> None:
        """Raise RoleFailed where the learner, which is starting, refuses the configuration in a moment."""
        while self.learner.runs and not self.learner.is_ready() and not self.interrupts:
            if self.learner.age > LEARNER_FIRST:
                return
            time.sleep(POLL)
        word = self.learner.last_word()
        if word is not None and word.code == 2:
            raise RoleFailed(word.reason, code=2)

    def _may_restart(self, role: Role) -> bool:
        """Count a restart, if it may be: a learner that died twice without a step in between would only die again.

        One that has found out something about a group that fails in its hands comes nearer to leaving that group out
        each time. Such a restart is not counted: `learner.bad_groups` says when there are too many of them.
        """
        if role is self.learner and self._new_blames():
            return True
        fails_again = role is self.learner and role.restarts > 0 and role.event("learner.step") is None
        allowed = self.config.run.restarts
        if role in self.generators:
            allowed = self.config.generate.restarts
        elif role in self.reward_models:
            allowed = self.config.reward_model.restarts
        if role.restarts >= allowed or fails_again:
            return False
        role.restarts += 1
        return True

    def _new_blames(self) -> bool:
        """Has the learner left something in RUN/quarantine that was not there before?"""
        found = {
            (path.name, path.read_bytes() if path.suffix == ".json" else b"")
            for path in (self.run_folder / "quarantine").glob("[!.]*")
        }
        new = found - self._blamed
        self._blamed |= found
        return bool(new)

    def _judge(self) -> bool:
        """Is the run complete? Raises RoleFailed where it is not, and was neither interrupted nor asked to exit, or has
        not saved what it had.
        """
        if self.interrupts and self.learner.exit_code != 0:
            if self.learner.is_ready():
                raise RoleFailed(f"interrupted before a checkpoint was saved; {self._log_tail(self.learner)}")
            return False
        done = max((row["step"] for row in read_metrics(self.run_folder)), default=0)
        if done >= self.config.run.steps:  # also where a signal came while the others ended
            return True
        if self.interrupts or (self._has_finished() and self.exited is not None):
            return False
        raise RoleFailed(f"ended at step {done} of {self.config.run.steps}; {self._log_tail(self.learner)}")

    def _stop(self, *, ask: bool) -> None:
        """Wait, `run.stop_timeout` at most, until all roles have ended.

        `ask` them to: the replay service tells everyone whom it knows. Who is still starting knows nobody
        yet, and gets a signal, `ask` or not.
        """
        starting = [role for role in self._running() if not role.is_ready()]
        for role in self._running():
            if role not in (self.learner, *self.reward_models) and (ask or role in starting):
                role.terminate()
        if ask and self.learner.runs and not self.learner.is_ready():  # it has nothing to save
            end_tree(self.learner.pid, timeout=0)
        began, told = time.monotonic(), not ask
        while time.monotonic() - began < self.config.run.stop_timeout and self.interrupts < 2 and self._running():
            if not told and self.replay not in self._running():
                told = True
                self._tell_learner()
            if not any(worker.runs for worker in self.generators):  # nobody asks them any more
                for role in self.reward_models:
                    role.terminate()
            if time.monotonic() - began > KILL_GRACE:
                _end(role for role in starting if role.runs)
            time.sleep(POLL)

    def _tell_learner(self) -> None:
        """Tell its ranks where no replay service does: they save a checkpoint, then end, told once or twice."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            learner = psutil.Process(self.learner.pid)
            for rank in [learner] if self.config.learner.ranks == 1 else learner.children():
                rank.terminate()

    def _kill(self) -> None:
        """End what has not ended: all are asked at once, then killed as whole trees."""
        for role in self._running():
            log.warning("%s did not end in time and is killed", role.name)
            role.terminate()
        deadline = time.monotonic() + KILL_GRACE
        while self._running() and time.monotonic() < deadline and self.interrupts < 3:
            time.sleep(POLL)
        _end(self._running())

    def _log_tail(self, role: Role) -> str:
        return f"last lines of {role.log}:\n{role.last_lines()}"

    def _running(self) -> list[Role]:
        return [role for role in self.roles if role.runs]

    def interrupt(self) -> None:
        """Ask for a clean end, with a checkpoint; asked a second time, kill. Any thread may ask."""
        self.interrupts += 1

    def _listen(self) -> dict[signal.Signals, Any]:
        """Take signals as interrupts where Python allows it, in the main thread. Returns the handlers of before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def _listen_no_more(self, former: Mapping[signal.Signals, Any]) -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.interrupt()

    def _role(self, name: str, arguments: list[str], index: int = 0) -> Role:
        return Role(
            name=f"{name}-{index}",
            command=[sys.executable, "-m", "streamrl.cli", name, *self._run_arguments(), *arguments],
            log=self.run_folder / "logs" / f"{name}-{index}.log",
            events=events.event_path(self.run_folder, name, index),
        )

    def _learner(self) -> Role:
        """The learner's ranks: under torchrun, or the only one."""
        role, ranks = self._role("learner", []), self.config.learner.ranks
        role.command[:3] = torchrun(ranks, "streamrl.cli")
        role.environment |= rank_environment(ranks) | {"OMP_NUM_THREADS": str(self.config.learner.threads)}
        return role

    def _hand_out(self, gpus: Sequence[str]) -> None:
        """Give every role that runs on GPUs its own of them, and the learner what its ranks need there."""
        self.learner.environment |= learner_environment(self.config, os.environ)
        placed = device_map(self.config, len(gpus))
        workers = [tuple(itertools.chain(*servers)) for servers in placed.workers]
        roles = [self.learner, *self.generators, *self.reward_models]
        for role, positions in zip(roles, [placed.ranks, *workers, *placed.reward_models], strict=True):
            role.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[position] for position in positions)

    def _run_arguments(self) -> list[str]:
        return ["--run-folder", str(self.run_folder), "--lifeline", str(os.getpid())]


def _end(roles: Iterable[Role]) -> None:
    """Kill them with everything that they have started."""
    for role in roles:
        end_tree(role.pid, timeout=0)
        assert role.exit_code is not None
