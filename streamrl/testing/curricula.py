"""What a curriculum must do: answer quickly, with prompts that there can be.

from streamrl.testing.curricula import CurriculumConformance

class TestHalves(CurriculumConformance):
    name = "curricula.py:Halves"
"""

from __future__ import annotations

from typing import Any, ClassVar

from streamrl.choices import CURRICULA
from streamrl.config.replay import ReplayConfig
from streamrl.replay.curricula import make_curriculum
from streamrl.replay.curricula.base import Curriculum
from streamrl.testing.declarations import Conformance

PROMPTS = 2000  # of each of two tasks


class CurriculumConformance(Conformance):
    """Give `name`, and what else the section `replay` needs, such as its own options."""

    kind = CURRICULA
    settings: ClassVar[dict[str, Any]] = {}

    def test_every_choice_is_the_index_of_a_prompt(self) -> None:
        for _, index in self._asked(self._curriculum()):
            assert isinstance(index, int)
            assert index >= 0

    def test_a_prompt_comes_twice_only_where_it_says_so(self) -> None:
        asked = self._asked(self._curriculum())
        assert len(set(asked)) == len(asked) or not self._curriculum().each_prompt_once

    def test_two_with_the_same_record_ask_the_same(self) -> None:
        assert self._asked(self._curriculum()) == self._asked(self._curriculum())

    def _curriculum(self) -> Curriculum:
        return make_curriculum(ReplayConfig.model_validate({"curriculum": self.name} | self.settings), seed=1)

    def _asked(self, curriculum: Curriculum) -> list[tuple[str, int]]:
        asked = []
        for count in range(PROMPTS):
            for place, task in enumerate(("sums", "words")):
                index = curriculum.choose(task, count)
                asked.append((task, index))
                curriculum.record(task, index, pass_rate=(count + place) % 5 / 4)
        return asked
