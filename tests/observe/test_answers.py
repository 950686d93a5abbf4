"""Which answers of a batch are shown, and that no batch is too large or too strange to be shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamrl.observe import answers
from streamrl.observe.answers import COLUMNS, GROUPS, LONGEST, Answers, shortened
from streamrl.types import Batch, Group


def test_the_best_and_the_worst_answer_of_a_few_groups_are_shown(make_group: Callable[..., Group]) -> None:
    groups = [make_group(group_id, samples=4) for group_id in range(3 * GROUPS)]
    rows = Answers(Path("no model")).rows(Batch(step=0, groups=tuple(groups)))
    shown = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [row["reward"] for row in shown] == [3.0, 0.0] * GROUPS
    assert len({row["group"] for row in shown}) == GROUPS
    assert shown[0]["prompt"] == " ".join(map(str, groups[0].samples[0].prompt_ids))  # without a tokenizer
    assert shown[-1]["group"] == groups[-1].group_id


def test_a_group_of_one_is_one_row_and_failed_groups_are_none(make_group: Callable[..., Group]) -> None:
    lost = make_group(0).as_placeholders("lost")
    shown = Answers(Path("no model"))
    assert len(shown.rows(Batch(step=0, groups=(lost, make_group(1, samples=1))))) == 1
    assert shown.rows(Batch(step=0, groups=(lost,))) == []


def test_of_a_long_text_both_ends_are_shown() -> None:
    text = "begin" + "x" * (2 * LONGEST) + "end"
    assert shortened(text).startswith("begin")
    assert shortened(text).endswith("end")
    assert len(shortened(text)) < LONGEST + 50
    assert shortened("x" * LONGEST) == "x" * answers.LONGEST
