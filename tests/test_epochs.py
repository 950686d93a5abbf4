"""The length of a run in epochs of its prompts, which becomes a number of steps before anything starts."""

from __future__ import annotations

import pytest

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.preflight.epochs import with_steps
from streamrl.tasks.left_out import LeftOut
from tests.tasks.test_left_out import of_task


def config_of(*words: str) -> Config:
    return config_file.load(None, ["replay.groups_per_step=4", *words])


@pytest.mark.parametrize(
    ("epochs", "size", "out", "steps"),
    [(2, 10, (), 5), (1, 10, (), 2), (1, 10, (3, 4), 2), (0.1, 120, (), 3), (1.5, 8, None, 3)],
)
def test_the_steps_are_the_whole_ones_of_the_prompts_that_fit(epochs, size, out, steps):
    config = config_of(f"run.epochs={epochs}")
    found = LeftOut(trained={"copy": of_task(size=size, left_out=out)})
    resolved = with_steps(config, found)
    assert (resolved.run.steps, resolved.run.epochs) == (steps, None)
    assert with_steps(config_of("run.steps=7"), found).run.steps == 7
    assert Config.model_validate(resolved.model_dump()) == resolved  # as the run's record has it


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            {"copy": of_task(size=None, left_out=None)},
            "run.epochs: 2 of copy, whose prompts have no end; allowed: run.steps",
        ),
        ({"a": of_task(), "b": of_task()}, "run.epochs: 2 of a mix of 2 tasks; allowed: run.steps"),
        (
            {"copy": of_task(size=1)},
            "run.epochs: 2 of the 1 prompts of copy make no step of replay.groups_per_step=4; allowed: at least 4",
        ),
    ],
)
def test_epochs_that_have_no_length_are_refused(found, line):
    with pytest.raises(ConfigError) as refused:
        with_steps(config_of("run.epochs=2"), LeftOut(trained=found))
    assert str(refused.value) == line


def test_a_length_is_given_once_and_null_takes_the_other_away():
    with pytest.raises(ConfigError, match=r"run.epochs: 2 is not possible beside run.steps=9; allowed: one of the two"):
        config_of("run.epochs=2", "run.steps=9")
    assert config_of("run.epochs=2", "run.steps=null").run.epochs == 2
    assert config_of("run.steps=null").run.steps == Config().run.steps


def test_a_configuration_with_epochs_is_the_same_once_it_is_written_and_read(tmp_path):
    config = config_of("run.epochs=2")
    config_file.save(config, tmp_path / "config.yaml")
    assert config_file.load(tmp_path / "config.yaml") == config
    assert config_file.checked(config_file.as_tree(config)) == config
