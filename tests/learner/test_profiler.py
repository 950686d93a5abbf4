"""torch's profiler over the steps that were asked for."""

from __future__ import annotations

import json

import pytest
from learner_parts import make_batch, make_config
from pydantic import ValidationError


def names(path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_the_asked_steps_of_the_asked_ranks_are_recorded(model_folder, trainer_of, tmp_path):
    run = tmp_path / "run"
    trainer = trainer_of(make_config(model_folder(), profile={"first_step": 2, "last_step": 3}), run)
    for step in range(2):
        trainer.train_step(make_batch(step))
    assert not (run / "profile").exists()
    trainer.train_step(make_batch(2))
    assert [path.name for path in (run / "profile").iterdir()] == ["rank_0_steps_2-3.json"]
    assert "aten::mm" in names(run / "profile" / "rank_0_steps_2-3.json")


def test_a_run_that_ends_within_the_range_leaves_what_there_is(model_folder, trainer_of, tmp_path):
    trainer = trainer_of(make_config(model_folder(), profile={"first_step": 1, "last_step": 9}), tmp_path / "run")
    trainer.train_step(make_batch())
    trainer._profiler.close()
    assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == ["rank_0_steps_1-1.json"]


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        ({"first_step": 3, "last_step": 2}, "last_step: 2 with first_step=3; allowed: null, or first_step and above"),
        ({"last_step": 2}, "last_step: 2 with first_step=null"),
        ({"first_step": 1, "ranks": [1]}, r"profile\.ranks: 1 is none of learner\.ranks=1; allowed: 0 to 0"),
    ],
)
def test_a_range_that_cannot_be_recorded_is_refused(profile, line, model_folder):
    with pytest.raises(ValidationError, match=line):
        make_config(model_folder(), profile=profile)
