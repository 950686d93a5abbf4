"""The supervisor: starts the roles of a run on one machine, watches them, ends all of its own children.

    replay service ──ready──▶ generator workers + learner ranks ──▶ console until the learner is done

Every role runs in a session of its own, writes RUN/logs/ROLE.log, and watches the supervisor's process:
whatever ends the supervisor, kill -9 included, ends them. A stop begins at the replay service, which tells
everyone; the learner then saves a checkpoint. Whoever has not ended `run.stop_timeout` later is killed.

A role that was ready and dies is started again, as often as `run.restarts` and `generate.restarts` allow: the
service recovers from its journal, the learner from its checkpoint, and a worker's tickets are issued again.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from streamrl.config import Config
from streamrl.lifeline import end_tree
from streamrl.observe import events, plot
from streamrl.observe.console import Console
from streamrl.observe.metrics import read_metrics
from streamrl.observe.prometheus import Exporter
from streamrl.stream.address import address_path

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at the roles; a person sees a dead role at once
KILL_GRACE = 15.0  # seconds between SIGTERM and SIGKILL of what is late: a worker ends its server first, 10 s on CUDA
LOG_LINES = 20  # last lines of a log that a report quotes

REFUSAL = "streamrl: "  # how the one line begins by which a role refuses its configuration


class RoleFailed(RuntimeError):
    """A role ended, or did not start, in a way that ends the run; the text quotes its log."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code  # of the whole command: 2 where the configuration was refused


@dataclass
class Role:
    """One child process of the supervisor and where it tells how it is."""

    name: str
    command: list[str]
    log: Path
    events: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    ready: bool = False
    restarts: int = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        self.started, self.ready = time.time(), False

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self.process.poll() if self.process else None

    def look_ready(self) -> bool:
        """True once the role has written the event `ready` since its start."""
        if not self.ready and self.events.exists():
            self.ready = any(
                event["event"] == "ready" and event["time"] >= self.started for event in events.read_events(self.events)
            )
        return self.ready

    def has_stepped(self) -> bool:
        """True when the learner has trained a step since its start."""
        return any(
            event["event"] == "learner.step" and event["phase"] == "end" and event["time"] >= self.started
            for event in events.read_events(self.events)
        )

    def given_up(self) -> str | None:
        """Why the learner ended for good since its start: to train the same batches again would end the same way."""
        told = (event for event in events.read_events(self.events) if event["event"] == "gave_up")
        return next((event["reason"] for event in told if event["time"] >= self.started), None)

    def refusal(self) -> str | None:
        """The line by which the role refused its configuration, if its log ends with one in the last lines."""
        lines = [line.strip() for line in self.last_lines().splitlines()]
        return next((line.removeprefix(REFUSAL) for line in reversed(lines) if line.startswith(REFUSAL)), None)

    def last_lines(self) -> str:
        if not self.log.exists():
            return "(no log)"
        with self.log.open(errors="replace") as lines:
            return "".join(f"  {line.rstrip()}\n" for line in deque(lines, LOG_LINES))


class Supervisor:
    """`streamrl train`: one run from start, or resume, to its end."""

    def __init__(self, config: Config, run_folder: Path) -> None:
        self.config = config
        self.run_folder = run_folder
        self.replay = self._role("replay", [])
        self.generators = [self._role("generator", ["--index", str(index)], index) for index in range(config.workers)]
        self.learner = self._learner()
        self.interrupts = 0

    @property
    def roles(self) -> list[Role]:
        return [self.replay, *self.generators, self.learner]

    def run(self) -> int:
        """Run to the end. Returns the exit code: 0 done, 1 failed, 130 interrupted after a clean checkpoint."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        exporter = Exporter.of(self.config, self.run_folder)
        console = Console(self.config, self.run_folder)
        try:
            self._start()
            self._watch(console)
            self._stop(ask=bool(self.interrupts))
            self._judge()
        except RoleFailed as failure:
            console.close()
            print(f"streamrl: {failure}", file=sys.stderr)
            self._stop(ask=True)
            return failure.code
        finally:
            self._kill()
            console.close()
            if exporter is not None:
                exporter.close()
            for number, handler in former.items():
                signal.signal(number, handler)
            events.merge(self.run_folder)
        plot.reward_curve(self.run_folder)
        if self.interrupts:
            print(f"streamrl: interrupted; the same command resumes {self.run_folder}", file=sys.stderr)
            return 130
        console.summary()
        return 0

    def _start(self) -> None:
        """Start the replay service and, when it listens, the others."""
        address_path(self.run_folder).unlink(missing_ok=True)
        self.replay.start()
        while not self.interrupts and not self.replay.look_ready():
            self._check(self.replay)
            time.sleep(POLL)
        if not self.interrupts:
            for role in (*self.generators, self.learner):
                role.start()

    def _watch(self, console: Console) -> None:
        """Until the learner is done or a signal came: report late roles, restart dead ones."""
        if self.learner.process is None:
            return
        metrics, last_step = self.run_folder / "metrics.jsonl", time.monotonic()
        size = 0
        while not self.interrupts and self.learner.exit_code != 0:
            for role in self.roles:
                self._check(role)
            if metrics.exists() and metrics.stat().st_size != size:
                size, last_step = metrics.stat().st_size, time.monotonic()
            if time.monotonic() - last_step > self.config.run.silence_timeout:
                raise RoleFailed(
                    f"no learner step in run.silence_timeout={self.config.run.silence_timeout:g} s; "
                    f"{self._told_by(self.learner)}"
                )
            console.refresh()
            time.sleep(POLL)

    def _check(self, role: Role) -> None:
        """Raise RoleFailed for a role that has failed or is late; start one again that may be."""
        code = role.exit_code
        if code is None:
            late = time.time() - role.started > self.config.run.start_timeout
            if late and not role.look_ready():
                raise RoleFailed(
                    f"{role.name} was not ready in run.start_timeout={self.config.run.start_timeout:g} s; "
                    f"{self._told_by(role)}"
                )
            return
        if code == 0:
            return
        was_ready = role.look_ready()
        if not was_ready and (refusal := role.refusal()):
            raise RoleFailed(refusal, code=2)
        if was_ready and (reason := role.given_up()):
            raise RoleFailed(f"{role.name} gave up: {reason}")
        if was_ready and self._may_restart(role):
            role.restarts += 1
            log.warning("%s ended with %s and is started again (%d)", role.name, _exit_text(code), role.restarts)
            role.start()
            return
        raise RoleFailed(f"{role.name} ended with {_exit_text(code)}; {self._told_by(role)}")

    def _may_restart(self, role: Role) -> bool:
        """Restarts are counted, and a learner that died twice without a step in between would only die again."""
        if role in self.generators:
            return role.restarts < self.config.generate.restarts
        fails_again = role is self.learner and role.restarts > 0 and not role.has_stepped()
        return role.restarts < self.config.run.restarts and not fails_again

    def _judge(self) -> None:
        """Raise RoleFailed unless the run is complete, or was interrupted and has saved what it had."""
        if self.interrupts:
            if self.learner.ready and self.learner.exit_code != 0:
                raise RoleFailed(f"interrupted before a checkpoint was saved; {self._told_by(self.learner)}")
            return
        done = max((row["step"] for row in read_metrics(self.run_folder)), default=0)
        if done < self.config.run.steps:
            raise RoleFailed(f"ended at step {done} of {self.config.run.steps}; {self._told_by(self.replay)}")

    def _stop(self, *, ask: bool) -> None:
        """Wait, `run.stop_timeout` at most, until all roles have ended.

        `ask` them to: the replay service tells everyone whom it knows. Who is still starting knows nobody
        yet, and is told by a signal, `ask` or not.
        """
        for role in (self.replay, *self.generators):
            if role in self._running() and (ask or not role.look_ready()):
                assert role.process is not None
                role.process.send_signal(signal.SIGTERM)
        if ask and self.learner in self._running():
            self._stop_learner()
        deadline = time.monotonic() + self.config.run.stop_timeout
        while time.monotonic() < deadline and self.interrupts < 2 and self._running():
            time.sleep(POLL)

    def _stop_learner(self) -> None:
        """End a learner that the replay service cannot tell: one that has nothing to save, or no service."""
        assert self.learner.process is not None
        if not self.learner.look_ready():
            end_tree(self.learner.process.pid, timeout=0)
        elif self.replay.exit_code is not None:
            for rank in psutil.Process(self.learner.process.pid).children():
                rank.terminate()  # it saves a checkpoint, then ends

    def _kill(self) -> None:
        """End what has not ended: all are asked at once, then killed as whole trees."""
        for role in self._running():
            log.warning("%s did not end in time and is killed", role.name)
            assert role.process is not None
            role.process.terminate()
        deadline = time.monotonic() + KILL_GRACE
        while self._running() and time.monotonic() < deadline and self.interrupts < 3:
            time.sleep(POLL)
        for role in self._running():
            assert role.process is not None
            end_tree(role.process.pid, timeout=0)
            role.process.poll()

    def _told_by(self, role: Role) -> str:
        return f"last lines of {role.log}:\n{role.last_lines()}"

    def _running(self) -> list[Role]:
        return [role for role in self.roles if role.process is not None and role.exit_code is None]

    def _on_signal(self, number: int, frame: object) -> None:
        """The first signal asks for a clean end, the second kills."""
        self.interrupts += 1

    def _role(self, name: str, arguments: list[str], index: int = 0) -> Role:
        return Role(
            name=f"{name}-{index}",
            command=[sys.executable, "-m", "streamrl.cli", name, *self._run_arguments(), *arguments],
            log=self.run_folder / "logs" / f"{name}-{index}.log",
            events=events.event_path(self.run_folder, name, index),
        )

    def _learner(self) -> Role:
        """The learner's ranks under torchrun, on a free loopback port of torchrun's choice."""
        role = self._role("learner", [])
        settings = self.config.learner
        torchrun = ["--nnodes=1", f"--nproc-per-node={settings.ranks}", "--rdzv-backend=c10d"]
        torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"]
        role.command[1:3] = ["-m", "torch.distributed.run", *torchrun, "-m", "streamrl.cli"]
        role.environment["OMP_NUM_THREADS"] = str(settings.threads)
        return role

    def _run_arguments(self) -> list[str]:
        return ["--run-folder", str(self.run_folder), "--lifeline", str(os.getpid())]


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
