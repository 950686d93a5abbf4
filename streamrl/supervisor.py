"""The supervisor: starts the roles of a run on one machine, watches them, ends all of its own children.

    replay service ──ready──▶ generator workers + learner ranks ──▶ console until the learner is done

Every role runs in a session of its own, writes RUN/logs/ROLE.log, and watches the supervisor's process:
whatever ends the supervisor, kill -9 included, ends them. A stop begins at the replay service, which tells
everyone; the learner then saves a checkpoint. Whoever has not ended `run.stop_timeout` later is killed.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from streamrl import config_file
from streamrl.config import Config
from streamrl.config_file import ConfigError
from streamrl.lifeline import end_tree
from streamrl.observe import events, plot
from streamrl.observe.console import Console

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at the roles; a person sees a dead role at once
KILL_GRACE = 15.0  # seconds between SIGTERM and SIGKILL of what is late: a worker ends its server first, 10 s on CUDA
LOG_LINES = 20  # last lines of a log that a report quotes

# Keys that may change when a run is resumed: none of them alters what recorded data means.
RESUMABLE = (
    "run.steps", "run.start_timeout", "run.stop_timeout", "run.silence_timeout", "replay.address",
    "generate.workers", "generate.attach", "generate.groups_in_flight", "generate.request_timeout",
    "generate.server_args", "generate.threads", "generate.heartbeat", "generate.probes", "generate.restarts",
    "generate.single_requests", "stream.", "learner.threads", "learner.tick", "learner.collective_timeout",
    "checkpoint.", "publish.bucket", "publish.timeout", "publish.keep_every", "observe.",
)  # fmt: skip


class RoleFailed(RuntimeError):
    """A role ended, or did not start, in a way that ends the run; the text quotes its log."""


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
        self.generators = [
            self._role("generator", ["--index", str(index)], index) for index in range(config.generate.workers)
        ]
        self.learner = self._learner()
        self.interrupts = 0

    @property
    def roles(self) -> list[Role]:
        return [self.replay, *self.generators, self.learner]

    def run(self) -> int:
        """Run to the end. Returns the exit code: 0 done, 1 failed, 130 interrupted after a clean checkpoint."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        console = Console(self.config, self.run_folder)
        try:
            self._start()
            self._watch(console)
            self._stop(ask=bool(self.interrupts))
        except RoleFailed as failure:
            console.close()
            print(f"streamrl: {failure}", file=sys.stderr)
            self._stop(ask=True)
            return 1
        finally:
            self._kill()
            console.close()
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
        (self.run_folder / "replay.address").unlink(missing_ok=True)
        self.replay.start()
        while not self.interrupts and not self.replay.look_ready():
            self._check(self.replay)
            time.sleep(POLL)
        if not self.interrupts:
            for role in (*self.generators, self.learner):
                role.start()

    def _watch(self, console: Console) -> None:
        """Until the learner is done or a signal came: report dead and late roles, restart generators."""
        if self.learner.process is None:
            return
        metrics, last_step = self.run_folder / "metrics.jsonl", time.monotonic()
        size = 0
        while not self.interrupts and self.learner.exit_code is None:
            for role in self.roles:
                self._check(role)
            if metrics.exists() and metrics.stat().st_size != size:
                size, last_step = metrics.stat().st_size, time.monotonic()
            if time.monotonic() - last_step > self.config.run.silence_timeout:
                raise RoleFailed(
                    f"no learner step in run.silence_timeout={self.config.run.silence_timeout:g} s; "
                    f"last lines of {self.learner.log}:\n{self.learner.last_lines()}"
                )
            console.refresh()
            time.sleep(POLL)
        if not self.interrupts:
            self._check(self.learner)

    def _check(self, role: Role) -> None:
        """Raise RoleFailed for a role that has failed or is late; restart a generator that may be restarted."""
        code = role.exit_code
        if code is None:
            late = time.time() - role.started > self.config.run.start_timeout
            if late and not role.look_ready():
                raise RoleFailed(
                    f"{role.name} was not ready in run.start_timeout={self.config.run.start_timeout:g} s; "
                    f"last lines of {role.log}:\n{role.last_lines()}"
                )
            return
        if code == 0:
            return
        was_ready = role.look_ready()
        if role in self.generators and was_ready and role.restarts < self.config.generate.restarts:
            log.warning("%s ended with %d and is started again", role.name, code)
            role.restarts += 1
            role.start()
            return
        raise RoleFailed(f"{role.name} ended with {_exit_text(code)}; last lines of {role.log}:\n{role.last_lines()}")

    def _stop(self, *, ask: bool) -> None:
        """Wait, `run.stop_timeout` at most, until all roles have ended.

        `ask` them to: the replay service tells everyone whom it knows; a generator may still be starting.
        """
        if ask:
            for role in (self.replay, *self.generators):
                if role.process is not None and role.exit_code is None:
                    role.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.config.run.stop_timeout
        while time.monotonic() < deadline and self.interrupts < 2 and self._running():
            time.sleep(POLL)

    def _kill(self) -> None:
        """End what has not ended."""
        for role in self._running():
            log.warning("%s did not end in time and is killed", role.name)
            assert role.process is not None
            end_tree(role.process.pid, timeout=KILL_GRACE)
            role.process.wait(timeout=10.0)

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


def prepare(config: Config, *, fresh: bool) -> Path:
    """Make the run folder, or check that an existing one may be resumed with `config`. Returns it.

    `fresh` keeps an existing folder under the next free name, NAME.1, NAME.2, and starts anew. Raises
    ConfigError for a changed key that would alter what the recorded data means, and for a missing model.
    """
    if not (config.model.path / "config.json").exists():
        raise ConfigError(
            f"model.path: {config.model.path} is no model; allowed: a Hugging Face folder (config.json, safetensors, "
            f"tokenizer); `python -m launch.tiny_model {config.model.path}` makes a tiny one"
        )
    folder = config.run_folder
    if fresh and folder.exists():
        _set_aside(folder)
    record = folder / "config.yaml"
    if record.exists():
        for path in config_file.changed(config_file.load(record), config):
            if not path.startswith(RESUMABLE):
                old = config_file.value_at(config_file.load(record), path)
                raise ConfigError(
                    f"{path}: {config_file.value_at(config, path)} differs from {old} of the run in {folder}; "
                    f"allowed: the same value, --fresh, or another run.name"
                )
    for name in ("events", "journal", "checkpoints", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    config_file.save(config, record)
    (folder / "environment.json").write_text(json.dumps(_environment(), indent=1) + "\n")
    return folder


def _set_aside(folder: Path) -> None:
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)


def _environment() -> dict[str, object]:
    """Packages, commit, host and command line of this start."""
    packages = (
        "streamrl",
        "torch",
        "megatron-core",
        "sglang",
        "transformers",
        "transformer-engine",
        "pyzmq",
        "msgpack",
    )
    installed = {name for distribution in metadata.distributions() if (name := distribution.name)}
    git = shutil.which("git")
    commit = subprocess.run(
        [git or "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    ).stdout.strip() if git else ""  # fmt: skip
    return {
        "packages": {name: metadata.version(name) for name in packages if name in installed},
        "python": platform.python_version(),
        "commit": commit,
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
    }


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
