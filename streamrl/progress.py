"""When a run that makes no learner step is given up: every role watches it, by its own clock.

    learner ──Progress──▶ replay service ──Progress──▶ workers      each step starts the watch of all again
    no step in run.progress_timeout ──▶ the role says so in one line, tells whom it can, and ends with 1

A role that is alone ends too: a learner whose generators all died, a worker whose learner or service never comes
back.
"""

from __future__ import annotations

from streamrl.config import Config


class RunFailedError(RuntimeError):
    """A role gives the run up, or was informed that another one did; the text is the one line that the user reads."""


class ProgressWatch:
    """Pure: time is an argument, in seconds on any clock that does not jump.

    Usage:
        watch = ProgressWatch(config, time.monotonic())
        watch.step(time.monotonic())
        if watch.is_over(time.monotonic()):
            raise RunFailedError(watch.line("no generator worker is there"))
    """

    def __init__(self, config: Config, now: float, *, patience: float = 0.0) -> None:
        """The role is ready `now`; before the first step the others may still take `run.start_timeout` to start.

        patience: further seconds for the replay service, which knows more of the reason, to speak first.
        """
        self._limit = config.progress_timeout
        self._patience = patience
        self._since = now + config.run.start_timeout

    def step(self, now: float) -> None:
        """A step was made, or what is as good as one."""
        self._since = now

    def is_over(self, now: float) -> bool:
        return now - self._since > self._limit + self._patience

    def line(self, why: str) -> str:
        """What the user reads; `why` is what this role sees of the reason."""
        return f"no learner step in run.progress_timeout={self._limit:g} s: {why}"
