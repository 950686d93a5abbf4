"""What a release policy must do: answer quickly, with a time, and as one that was told the same.

from streamrl.testing.releases import ReleaseConformance

class TestFixed(ReleaseConformance):
    name = "fixed.py:Fixed"

That no policy can stop a run, or break the bound, is the service's own part (`replay/release_gate.py`).
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from streamrl.choices import RELEASES
from streamrl.config.replay import ReplayConfig
from streamrl.observe.metrics import METRICS
from streamrl.replay.releases import make_release
from streamrl.replay.releases.base import Release
from streamrl.testing.declarations import Conformance

GROUPS = 500  # that a policy is told of


class ReleaseConformance(Conformance):
    """Give `name`, and what else the section `replay` needs, such as its own options."""

    kind = RELEASES
    settings: ClassVar[dict[str, Any]] = {}

    def test_every_lead_time_is_a_number_of_seconds(self) -> None:
        for lead in self._leads(self._release()):
            assert lead is None or lead >= 0, f"{lead} is no time"

    def test_two_that_were_told_the_same_answer_the_same(self) -> None:
        assert self._leads(self._release()) == self._leads(self._release())

    def test_it_knows_a_lead_time_when_its_slow_start_is_over(self) -> None:
        release = self._release()
        for _ in range(release.slow_start * release.groups_per_step):
            release.completed(1.0)
        assert release.lead((), 1.0) is not None, f"none after slow_start = {release.slow_start} steps"

    def test_its_metrics_have_a_meaning(self) -> None:
        release = self._release()
        self._leads(release)
        assert release.metrics().keys() <= {metric.name for metric in METRICS}

    def _release(self) -> Release:
        return make_release(ReplayConfig.model_validate({"release": self.name} | self.settings))

    def _leads(self, release: Release) -> list[float | None]:
        chance, leads = random.Random(1), list[float | None]()
        for _ in range(GROUPS):
            release.completed(chance.lognormvariate(0.0, 1.0))
            open_for = sorted((chance.uniform(0.0, 30.0) for _ in range(chance.randrange(20))), reverse=True)
            leads.append(release.lead(open_for, chance.choice((1.0, 2.5))))
        return leads
