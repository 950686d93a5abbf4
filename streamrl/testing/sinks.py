"""What a sink must do: write each step's numbers, what is evaluated later as well, and go on after a resume.

from streamrl.testing.sinks import SinkConformance

class TestCsv(SinkConformance):
    name = "csv_sink.py:Csv"

    def read(self, run_folder):
        ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from streamrl.choices import SINKS
from streamrl.config import Config
from streamrl.observe.metrics import MetricsWriter
from streamrl.observe.sinks import open_sinks
from streamrl.observe.sinks.base import Sink
from streamrl.testing.declarations import Conformance
from streamrl.types import Batch, Group, Sample


class SinkConformance(Conformance):
    """Give `name`, and what else the section `observe` needs, such as its own options."""

    kind = SINKS
    settings: ClassVar[dict[str, Any]] = {}

    def read(self, run_folder: Path) -> dict[str, dict[int, float]] | None:
        """What the sink has written: metric -> step -> value; None where nobody can read it here."""
        return None

    def test_every_number_of_a_run_that_was_resumed_is_there(self, tmp_path: Path) -> None:
        for first, last, off in ((1, 7, 0.5), (4, 6, 0.0)):
            writer = MetricsWriter(tmp_path, open_sinks(self._config, tmp_path))
            writer.truncate_after(first - 1)
            for step in range(first, last + 1):
                writer.write_batch(step, _failed_batch(step))
                writer.write({"step": step, "version": f"{step}.0", "lr": float("nan"), "reward/mean": step + off})
            writer.amend(2, {"eval/step": 2.0})
            writer.close()
        written = self.read(tmp_path)
        if written is not None:
            assert "lr" not in written, "a number that is not finite is none"
            assert written["eval/step"][2] == 2.0
            assert {step: written["reward/mean"][step] for step in range(1, 7)} == {
                step: step + (0.5 if step < 4 else 0.0) for step in range(1, 7)
            }
            if self.declaration.truncate_after is not Sink.truncate_after:
                assert 7 not in written["reward/mean"], "truncate_after(3) leaves step 7, which no resume has made"

    def test_it_is_opened_once(self, tmp_path: Path) -> None:
        sinks = open_sinks(self._config, tmp_path)
        assert [type(sink) for sink in sinks] == [self.declaration]
        for sink in sinks:
            sink.close()

    def test_where_it_writes_is_words_for_a_person_or_nothing(self, tmp_path: Path) -> None:
        for sink in open_sinks(self._config, tmp_path):
            assert sink.where is None or (isinstance(sink.where, str) and sink.where)
            sink.close()

    @property
    def _config(self) -> Config:
        return Config.model_validate({"observe": {"sink": self.name} | self.settings})


def _failed_batch(step: int) -> Batch:
    """A batch of which nothing can be shown: every sample of its group has failed."""
    samples = (Sample.placeholder(failure="server"),) * 2
    return Batch(step=step - 1, groups=(Group(group_id=0, task="copy", prompt_index=0, samples=samples),))
