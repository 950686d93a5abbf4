"""When a learner ends before its last step, in good order, for its job to be gone on with later. Pure."""

from __future__ import annotations

from streamrl.config.run import RunConfig

MINUTE = 60.0  # seconds


class Exits:
    """`run.exit_interval` and `run.exit_duration`, looked at behind each step.

    >>> exits = Exits(RunConfig(exit_interval=10, exit_duration=30), now=0.0)
    >>> exits.reason(step=9, now=60.0), exits.reason(step=10, now=60.0), exits.reason(step=11, now=1800.0)
    (None, 'run.exit_interval=10 divides step 10', 'run.exit_duration=30 minutes are over')
    """

    def __init__(self, run: RunConfig | None, now: float) -> None:
        """The learner starts `now`, in seconds. None: it never ends so."""
        self._run = run
        self._began = now

    def reason(self, step: int, now: float) -> str | None:
        """Why the run ends behind this step; None where it goes on, or is complete."""
        if self._run is None or step >= self._run.steps:
            return None
        interval, duration = self._run.exit_interval, self._run.exit_duration
        if interval is not None and step % interval == 0:
            return f"run.exit_interval={interval} divides step {step}"
        if duration is not None and now - self._began >= MINUTE * duration:
            return f"run.exit_duration={duration:g} minutes are over"
        return None
