"""What a sink is: it gets the metrics of each step, under the names of `metrics.jsonl`.

The class is loaded by every process that reads the configuration; the learner's first rank opens it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.config.observe import ObserveConfig
    from streamrl.types import Batch


class Sink(Choice, ABC):
    """Writes rows of metrics, in the order of the steps; what was evaluated of a step follows in a row of its own."""

    def __init__(self, config: Config, run_folder: Path, options: Options) -> None:
        """`options`: those of `observe.sink_options`, of the class's own Options."""
        self.config, self.run_folder, self.options = config, run_folder, options

    @classmethod
    def is_asked_for(cls, observe: ObserveConfig) -> bool:
        """Whether another key than `observe.sink` turns it on."""
        return False

    @abstractmethod
    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the row of `step`, or further metrics of it; None means a number that is not finite."""

    @property
    def where(self) -> str | None:
        """A URL, or words, of where it shows what it was given: for the console; None: it has nothing to say."""
        return None

    def write_batch(self, step: int, batch: Batch) -> None:
        """Show samples of the batch that made `step`; the row of that step comes after it."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and let go."""

    def truncate_after(self, step: int) -> None:
        """A resume begins at `step`: forget later steps, where the sink can."""


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that are numbers."""
    return {name: float(value) for name, value in row.items() if name != "step" and isinstance(value, int | float)}
