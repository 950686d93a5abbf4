"""The phases of a run in its replay service: from the first message to the exit code.

No I/O and no clock: the service (`replay/core.py`) reports what happens and asks whether the run goes on.
"""

from __future__ import annotations

from enum import Enum, auto

from streamrl.machine import Machine
from streamrl.types import PolicyVersion


class Phase(Enum):
    SERVING = auto()  # tickets, groups, batches
    FINISHING = auto()  # the learner has made its last step; its version is published and evaluated
    STOPPING = auto()  # every peer was sent Stop; a run that did not fail waits for their Byes
    ENDED = auto()


class Event(Enum):
    LEARNER_BEGAN = auto()
    FINISHED = auto()  # the learner says so
    EXITED = auto()  # the learner has saved a checkpoint and ends before its last step, to be gone on with
    COMPLETE = auto()  # every server has the last version, or publish.timeout is over
    FAILED = auto()  # given up, by whichever role
    INTERRUPTED = auto()  # by a signal
    OVER = auto()  # everybody has left, or run.stop_timeout is over, or the run has failed


TRANSITIONS = {
    (Phase.SERVING, Event.LEARNER_BEGAN): Phase.SERVING,
    (Phase.SERVING, Event.FINISHED): Phase.FINISHING,
    (Phase.SERVING, Event.EXITED): Phase.STOPPING,
    (Phase.SERVING, Event.FAILED): Phase.STOPPING,
    (Phase.SERVING, Event.INTERRUPTED): Phase.ENDED,
    # A learner that was killed after its last step begins at its checkpoint.
    (Phase.FINISHING, Event.LEARNER_BEGAN): Phase.SERVING,
    # A learner says it again to a service that it lost sight of; the last publish has its whole time from then on.
    (Phase.FINISHING, Event.FINISHED): Phase.FINISHING,
    (Phase.FINISHING, Event.COMPLETE): Phase.STOPPING,
    (Phase.FINISHING, Event.FAILED): Phase.STOPPING,
    (Phase.FINISHING, Event.INTERRUPTED): Phase.ENDED,
    (Phase.STOPPING, Event.FINISHED): Phase.STOPPING,
    (Phase.STOPPING, Event.FAILED): Phase.STOPPING,
    (Phase.STOPPING, Event.INTERRUPTED): Phase.ENDED,
    (Phase.STOPPING, Event.OVER): Phase.ENDED,
}

PHASES = Machine("The phases of a run", TRANSITIONS, Phase.SERVING)


class Phases:
    """The phase that a run is in. Times are in seconds on the caller's clock.

    >>> phases = Phases(publish_timeout=60.0, longest_evaluation=0.0, stop_timeout=10.0)
    >>> phases.finished(PolicyVersion(3), now=0.0)
    >>> phases.is_published(now=1.0, everywhere=True, evaluating=False)
    True
    >>> phases.complete(now=1.0)
    >>> phases.is_over(now=2.0, anyone=True), phases.is_over(now=11.0, anyone=True)
    (False, True)
    """

    def __init__(self, publish_timeout: float, longest_evaluation: float, stop_timeout: float) -> None:
        """publish.timeout, `evaluate.longest` and run.stop_timeout, in seconds."""
        self.phase = Phase.SERVING
        self.final: PolicyVersion | None = None  # that the learner has ended with, while the run is FINISHING
        self.code = 1  # exit code, decided when the run stops
        self._publish_timeout = publish_timeout
        self._longest_evaluation = longest_evaluation
        self._stop_timeout = stop_timeout
        self._deadline = float("inf")  # of the last publish, then of the Byes

    @property
    def goes_on(self) -> bool:
        """Was nobody asked to stop?"""
        return self.phase in (Phase.SERVING, Phase.FINISHING)

    @property
    def has_failed(self) -> bool:
        """Was everybody sent that the run has failed?"""
        return not self.goes_on and self.code == 1

    def learner_began(self) -> None:
        """A learner begins at a checkpoint."""
        self._move(Event.LEARNER_BEGAN)
        self.final = None

    def finished(self, final: PolicyVersion, now: float) -> None:
        """The learner has made the last step of the run, and publishes `final`."""
        self._move(Event.FINISHED)
        if self.phase is Phase.FINISHING:
            self.final, self._deadline = final, now + self._publish_timeout

    def is_published(self, now: float, *, everywhere: bool, evaluating: bool) -> bool:
        """Is the last version out, and evaluated, or the time of both over?

        `everywhere`: every server has it. `evaluating`: a server is being evaluated.
        """
        if evaluating and now < self._deadline + self._longest_evaluation:
            return False
        return everywhere or now >= self._deadline

    def complete(self, now: float) -> None:
        """The run has succeeded."""
        self._move(Event.COMPLETE)
        self.code, self._deadline = 0, now + self._stop_timeout

    def exited(self, now: float) -> None:
        """The learner ends here, in good order, before its last step."""
        self._move(Event.EXITED)
        self.code, self._deadline = 0, now + self._stop_timeout

    def fail(self) -> None:
        """The run has failed: nobody is waited for."""
        self._move(Event.FAILED)
        self.code, self._deadline = 1, float("-inf")

    def interrupt(self, code: int) -> None:
        """A signal ends the service with this exit code, at once."""
        self._move(Event.INTERRUPTED)
        self.code = code

    def is_over(self, now: float, *, anyone: bool) -> bool:
        """May the service exit? `anyone`: a worker has not said Bye."""
        if self.phase is Phase.STOPPING and (now >= self._deadline or not anyone):
            self._move(Event.OVER)
        return self.phase is Phase.ENDED

    def _move(self, event: Event) -> None:
        self.phase = PHASES.next(self.phase, event)
