"""What a controller of the adaptive bound is: it says when the admitted staleness moves, where to, and why.

    learner ──signals of each step──▶ controller ──Move──▶ replay/adaptive.py ──slots──▶ tickets

It runs in the replay service, between two messages: it must be quick, and import no torch. It cannot break the bound
or stop the run: `replay/adaptive.py` keeps whatever it answers within what is proved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from streamrl.config.replay import AdaptiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A learner step, as a controller sees it. Staleness is in learner steps.

    Example: `Seen(step=7, admitted=16.0, lowest=0.0, highest=16.0, signals={"offpolicy/ess": 0.9})`.
    """

    step: int  # learner steps in the weights after it
    admitted: float  # staleness that is admitted now
    lowest: float  # that may be admitted: what a publish every k steps needs
    highest: float  # the configured bound
    signals: Mapping[str, float]  # finite; of `Controller.signals` those that the step has


@dataclass(frozen=True, slots=True)
class Move:
    """The staleness to admit from now on, and why, in a few words."""

    staleness: float
    reason: str


class Controller(Choice, ABC):
    """Moves the admitted staleness by what the learner's metrics show."""

    signals: ClassVar[tuple[str, ...]] = ()  # metrics of a step (`observe/metrics.py`) that the learner reports

    def __init__(self, config: AdaptiveConfig, options: Options) -> None:
        """`options`: those of `replay.adaptive.controller_options`, of the class's own Options."""
        self.config = config
        self.options = options

    @abstractmethod
    def judge(self, seen: Seen) -> Move | None:
        """Take the next step, each once, in order. Returns where to move; None: stay."""

    def memory(self) -> dict[str, float]:
        """What the controller knows beside the bound: kept in the journal with every move."""
        return {}

    def recall(self, memory: Mapping[str, float]) -> None:
        """A service that was started again: what `memory` gave at the last move."""
