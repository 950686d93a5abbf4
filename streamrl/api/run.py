"""A run that was started from Python: a thread with its supervisor, and the handle that the caller holds.

train() ─▶ thread: checks ─▶ supervisor until the run is over         callbacks: a thread of their own
caller  ◀── Run: wait(), stop(), metrics, model_path
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from enum import Enum, auto
from pathlib import Path

from streamrl.api.following import POLL, Callbacks, Caller, Metrics
from streamrl.api.inputs import Inputs
from streamrl.api.launching import launched
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.hub.model import with_local_models
from streamrl.machine import Machine
from streamrl.observe.ending import MODEL, saved_steps
from streamrl.places import absolute
from streamrl.supervisor import Supervisor

log = logging.getLogger(__name__)


class State(Enum):
    CHECKING = auto()  # nothing is started or written yet
    RUNNING = auto()
    STOPPING = auto()  # it was asked to; the learner saves a checkpoint
    DONE = auto()  # all steps
    INTERRUPTED = auto()  # with a checkpoint, from which it can be resumed
    FAILED = auto()


class Event(Enum):
    STARTED = auto()
    REFUSED = auto()  # by a check
    STOP = auto()
    COMPLETE = auto()  # exit code 0
    SAVED = auto()  # 130, or 0 where the run ended before its last step as it was asked to
    BROKE = auto()  # any other
    RESUME = auto()


TRANSITIONS = {
    (State.CHECKING, Event.STARTED): State.RUNNING,
    (State.CHECKING, Event.REFUSED): State.FAILED,
    (State.RUNNING, Event.STOP): State.STOPPING,
    (State.RUNNING, Event.COMPLETE): State.DONE,
    (State.RUNNING, Event.SAVED): State.INTERRUPTED,  # by a signal, or run.exit_interval, run.exit_duration
    (State.RUNNING, Event.BROKE): State.FAILED,
    (State.STOPPING, Event.STOP): State.STOPPING,  # now, or without effect
    (State.STOPPING, Event.COMPLETE): State.DONE,
    (State.STOPPING, Event.SAVED): State.INTERRUPTED,
    (State.STOPPING, Event.BROKE): State.FAILED,
    (State.DONE, Event.RESUME): State.CHECKING,  # for more steps
    (State.INTERRUPTED, Event.RESUME): State.CHECKING,
    (State.FAILED, Event.RESUME): State.CHECKING,
}

RUN = Machine("A run that was started from Python", TRANSITIONS, State.CHECKING)

OVER = (State.DONE, State.INTERRUPTED, State.FAILED)
SAVED = 130  # the exit code of a run that was interrupted, its checkpoint saved
ENDINGS = {0: Event.COMPLETE, SAVED: Event.SAVED}  # by the exit code


class RunFailed(RuntimeError):
    """A run that has ended with an error, whose text says why. `code`: what the command would have exited with."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Run:
    """A handle to a run. `streamrl.train` makes it.

    Usage:
        run = streamrl.train(...)
        for row in run.metrics: ...
        run.wait().model_path
    """

    def __init__(self, config: Config, inputs: Inputs | None, callbacks: Callbacks) -> None:
        """Raises ConfigError for a model of the hub that cannot be had."""
        self.config = absolute(with_local_models(config))
        self._inputs = inputs
        self._callbacks = callbacks
        self._lock = threading.Lock()  # of all below
        self._state = State.CHECKING
        self._supervisor: Supervisor | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._calls: threading.Thread | None = None  # that of the callbacks
        self._abandoned = False

    def __repr__(self) -> str:
        row = self.metrics.latest
        step = f"step {row['step']} of {self.config.run.steps}" if row else "no step yet"
        return f"<Run {self.name}: {self.state.name.lower()}, {step}>"

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def folder(self) -> Path:
        """The run folder, which every command of `streamrl` takes."""
        return self.config.run_folder

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_over(self) -> bool:
        return self._state in OVER

    @property
    def metrics(self) -> Metrics:
        """Its rows: iterating over them follows the run to its end."""
        return Metrics(self.folder, lambda: self.is_over)

    @property
    def model_path(self) -> Path:
        """The trained model, a folder that `transformers` and SGLang load. Raises FileNotFoundError before the end."""
        path = self.folder / MODEL
        if not path.is_dir():
            steps = saved_steps(self.folder)
            there = (
                f"its newest checkpoint is {self.folder}/checkpoints/step_{steps[-1]}" if steps else "no checkpoint yet"
            )
            raise FileNotFoundError(f"{path}: the run {self.name} has not come to its end; {there}")
        return path

    def start(self, *, fresh: bool = False) -> Run:
        """Start, and return when every check has been made and the processes start.

        Raises ConfigError for what cannot run; nothing is written then.
        """
        checked, self._abandoned = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(fresh, checked), name=f"run {self.name}", daemon=True)
        self._thread.start()
        try:
            checked.wait()
        except KeyboardInterrupt:
            self._abandoned = True  # a thread cannot be ended: what follows the checks ends at once
            raise
        if self._state is State.FAILED and self._supervisor is None:
            assert self._error is not None
            raise self._error
        return self

    def wait(self, timeout: float | None = None) -> Run:
        """Until the run is over. Ctrl-C stops it first, with a checkpoint; a second one ends it at once.

        Raises RunFailed for a run that failed, what a callback raised, TimeoutError after `timeout` seconds, and
        RuntimeError in a callback, which the run waits for itself.
        """
        if threading.current_thread() is self._calls:
            raise RuntimeError("wait: a callback cannot wait for its run; allowed: stop()")
        interrupted = self._join(timeout)
        if interrupted is not None:
            raise interrupted
        if not self.is_over:
            raise TimeoutError(f"the run {self.name} is not over after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self

    def stop(self, *, now: bool = False) -> None:
        """Ask the run to save a checkpoint and end; `wait` until it has. Asked again, it goes on doing so.

        `now`: it is ended at once, without a checkpoint.
        """
        with self._lock:
            if self._supervisor is None or self._state in OVER:
                return
            asked = self._state is State.STOPPING
            self._state = RUN.next(self._state, Event.STOP)
            for _ in range(now + (not asked)):
                self._supervisor.interrupt()

    def resume(self, steps: int | None = None) -> Run:
        """Start a run that is over again, from its last checkpoint. `steps`: of the whole run, where they differ.

        Raises RuntimeError while it runs, ConfigError as `start` does, and for other steps than whole numbers above 0.
        """
        config = self.config if steps is None else _with_steps(self.config, steps)
        with self._lock:
            if self._state not in OVER:
                raise RuntimeError(f"the run {self.name} is not over; allowed: stop() and wait() first")
            self._state = RUN.next(self._state, Event.RESUME)
            self._supervisor, self._error = None, None
        self.config = config
        return self.start()

    def _run(self, fresh: bool, checked: threading.Event) -> None:
        """The thread of one start."""
        code = 1
        try:
            with launched(self.config, fresh=fresh, inputs=self._inputs) as supervisor:
                self.config = supervisor.config  # with the steps that its epochs have
                self._begin(supervisor)
                checked.set()
                code = self._supervised(supervisor)
        except BaseException as error:  # told to the caller that waits
            self._error = error
        finally:
            with self._lock:
                refused = self._state is State.CHECKING
                self._state = RUN.next(self._state, Event.REFUSED if refused else ENDINGS.get(code, Event.BROKE))
            atexit.unregister(self._at_exit)
            checked.set()

    def _begin(self, supervisor: Supervisor) -> None:
        with self._lock:
            self._state = RUN.next(self._state, Event.STARTED)
            self._supervisor = supervisor
        atexit.register(self._at_exit)
        if self._abandoned:
            self.stop()

    def _supervised(self, supervisor: Supervisor) -> int:
        """The exit code, once every process has ended and every callback has been made."""
        ended = threading.Event()
        caller = Caller(self._callbacks, self.folder)
        name = f"callbacks {self.name}"
        self._calls = threading.Thread(target=self._call, args=(caller, ended), name=name, daemon=True)
        self._calls.start()
        try:
            code = supervisor.run()
            code = SAVED if code == 0 and supervisor.exited is not None else code
        finally:
            ended.set()
        self._calls.join(self.config.run.stop_timeout)
        if self._calls.is_alive():
            log.error("a callback did not return in run.stop_timeout=%g s", self.config.run.stop_timeout)
        if self._error is None and code not in ENDINGS:
            self._error = RunFailed(supervisor.failure or f"the run {self.name} failed", code)
        return code

    def _call(self, caller: Caller, ended: threading.Event) -> None:
        """The thread of the callbacks. One that raises stops the run; `wait` raises it again."""
        try:
            while not ended.wait(POLL):
                caller.call()
            caller.call()
        except BaseException as error:  # the user's code, which may call sys.exit
            log.error("a callback raised %r: the run is stopped", error)
            self._error = error
            self.stop()

    def _join(self, timeout: float | None) -> KeyboardInterrupt | None:
        """Wait for the thread; a wait without an end would hold back Ctrl-C. Returns the first one."""
        interrupted: KeyboardInterrupt | None = None
        left = timeout
        while self._thread is not None and self._thread.is_alive() and (left is None or left > 0):
            try:
                self._thread.join(POLL if left is None else min(POLL, left))
                left = None if left is None else left - POLL
            except KeyboardInterrupt as signal:
                self.stop(now=interrupted is not None)
                interrupted = interrupted or signal
                left = None
        return interrupted

    def _at_exit(self) -> None:
        """A script that ends waits for its run. One that fails, and a notebook, stops it, with a checkpoint."""
        if hasattr(sys, "ps1") or hasattr(sys, "last_value") or "ipykernel" in sys.modules:
            self.stop()
        if self._join(None) is not None:
            log.warning("the run %s was interrupted", self.name)


def _with_steps(config: Config, steps: int) -> Config:
    """The same run with other steps. Raises ConfigError."""
    tree = config_file.as_tree(config)
    tree["run"] |= {"steps": steps, "epochs": None}
    return config_file.checked(tree)
