"""Which updates are made and when a run that makes none must end: decisions from numbers alone.

    loss, gradient norm ──judge──▶ ok | empty | not finite | spike      each update
    updates of the step ──end_step──▶ go on, or BadStepsError           each learner step

An update that is not made leaves weights and moments as they are. One without a token is "empty": Adam would still move
the weights by its old moments and their decay. It is no bad one, and no good one either.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from typing import Any, Literal

from streamrl.config.learner import OptimizerSettings

Verdict = Literal["ok", "empty", "not finite", "spike", "held"]  # held: a critic is warmed up first


class BadStepsError(RuntimeError):
    """The last `learner.bad_steps` steps made no update; the text is the one line that the user reads."""


class UpdateGuard:
    """The gradient norms of the recent updates, and the steps in a row that made none.

    Every finite norm counts for the median, that of a skipped spike too: a level that has changed for good is
    accepted after half a window. Norms of 0 (batches without a signal) do not count.

    >>> guard = UpdateGuard(OptimizerSettings(spike_factor=3, spike_window=4), bad_steps=2)
    >>> [guard.judge(0.1, norm) for norm in (1.0, 1.2, 9.0, math.nan)]
    ['ok', 'ok', 'spike', 'not finite']
    """

    def __init__(self, settings: OptimizerSettings, bad_steps: int) -> None:
        """bad_steps: steps in a row without an update after which `end_step` raises; 0: never."""
        self._factor = settings.spike_factor
        self._norms: deque[float] = deque(maxlen=settings.spike_window)
        self._needed = settings.spike_window // 2  # norms without which a median says little
        self._limit = bad_steps
        self._bad = 0
        self._step: Counter[Verdict] = Counter()  # of the step that is under way
        self._reasons: Counter[Verdict] = Counter()  # of the bad steps in a row
        self._last = 0.0

    def judge(self, loss: float, grad_norm: float, *, empty: bool = False) -> Verdict:
        """Whether an update with this loss and gradient norm (before clipping) may be made. empty: it has no token."""
        if empty:
            return "empty"
        verdict = self._judge(loss, grad_norm)
        if math.isfinite(grad_norm) and grad_norm > 0:
            self._norms.append(grad_norm)
        self._step[verdict] += 1
        self._last = grad_norm
        return verdict

    def end_step(self) -> None:
        """Close a learner step. Raises BadStepsError when it was the last of too many without an update.

        A step of nothing but empty updates is as if it had not been.
        """
        if self._step["ok"]:
            self._bad = 0
            self._reasons.clear()
        elif self._step:
            self._bad += 1
            self._reasons += self._step
        self._step.clear()
        if self._limit and self._bad >= self._limit:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._reasons.items()))
            raise BadStepsError(
                f"{self._bad} steps in a row made no update (learner.bad_steps: {self._limit}); "
                f"refused updates: {reasons}; the last gradient norm was {self._last:g}"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide as the uninterrupted one does."""
        return {"norms": list(self._norms), "bad": self._bad, "reasons": dict(self._reasons)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend(state["norms"])
        self._bad = state["bad"]
        self._reasons = Counter(state["reasons"])

    def _judge(self, loss: float, grad_norm: float) -> Verdict:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "not finite"
        if self._factor is None or len(self._norms) < self._needed:
            return "ok"
        return "spike" if grad_norm > self._factor * statistics.median(self._norms) else "ok"
