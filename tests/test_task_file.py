"""The task file of Megatron-RL's form: its rules, and what a run keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import file as config_file
from streamrl.config.file import ConfigError

FILE = """
- {agent_type: copy, agent_args: {length: 2}, weight: 3}
- {agent_type: copy, label: long, agent_args: {length: 5}}
- {agent_type: successor, weight: 0}
- {agent_type: lookup, label: held, evaluation_only: true, weight: 2}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *overrides: str):
        (tmp_path / "tasks.yaml").write_text(text)
        return config_file.load(None, [f"task.file={tmp_path / 'tasks.yaml'}", *overrides])

    return load


def test_entries_become_the_mix_and_those_for_evaluation_are_not_trained(load):
    task = load(FILE).task
    assert [(share.key, share.weight) for share in task.shares] == [("copy", 3), ("long", 1), ("successor", 0)]
    assert [share.key for share in task.evaluated] == ["held"]
    assert [share.key for share in task.trained] == ["copy", "long"]


def test_a_run_keeps_the_entries_and_not_the_file(load, tmp_path):
    config = load(FILE)
    assert config.task.file is None
    (tmp_path / "tasks.yaml").unlink()
    again = type(config).model_validate(config.model_dump())
    assert again.task == config.task


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {agent_type: copy}\n- {agent_type: copy}", "task.mix: 'copy' is there twice"),
        ("- {agent_type: copy, weight: 0}", "every weight of a trained task is 0"),
        ("- {agent_type: copy, evaluation_only: true}", "every weight of a trained task is 0"),
        ("- {agent_type: copy, wieght: 1}", "unknown key 'wieght'"),
        ("- {weight: 1}", "agent_type is missing"),
        ("a: 1", "holds no list of mappings"),
        ("- {", "not YAML"),
        ("- {agent_type: kopy}", "task.mix"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(load, text, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        load(text)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(("task.", "override task."))


def test_a_file_that_is_not_there_and_one_beside_a_mix_are_refused(load):
    with pytest.raises(ConfigError, match=r"task\.file: .*cannot be read"):
        config_file.load(None, ["task.file=/nowhere.yaml"])
    with pytest.raises(ConfigError, match=r"task\.file: is not allowed beside mix"):
        load(FILE, "task.mix=[{name: copy}]")
