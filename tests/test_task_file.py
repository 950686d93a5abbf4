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
        ("- {agent_type: kopy}", r"tasks\.yaml:1: agent_type: kopy is not allowed; .* one of DAPOAgent, .*copy, "),
        ("- agent_type: copy\n- agent_type: NemoGymAgent", r"tasks\.yaml:2: agent_type: NemoGymAgent is not allowed"),
        ("- agent_type: examples.rl.environments.web:WebAgent", r"yaml:1: agent_type: examples.* is not allowed"),
        (
            "- agent_type: AIMEAgent\n  agent_args:\n    fromat_reward: 0",
            r"tasks\.yaml:3: agent_args\.fromat_reward: unknown key .*nearest known key: agent_args\.format_reward",
        ),
        (
            "- agent_type: DAPOAgent\n  agent_args: {answer_format: spoken}",
            r"tasks\.yaml:2: agent_args\.answer_format: 'spoken' is not allowed .* one of tagged, boxed",
        ),
        ("- {agent_type: [copy]}", "agent_type: .* is not allowed"),
        ("- {agent_type: copy, agent_args: 3}", "agent_args: 3 is not allowed"),
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


# The schema of the examples of Megatron-RL: agents by name, arguments, weights, evaluation alone.
EXAMPLES = """
- agent_type: DAPOAgent
  agent_args:
    format_reward: 0.0
  weight: 1.0
- agent_type: examples.rl.environments.math.gsm8k_agent:GSM8KAgent
  agent_args:
    answer_format: "boxed"
    format_reward: 0.5
    negative_reward: 0.0
    partial_end_reward: 0.75
  weight: 2.0
  evaluation_only: false
- agent_type: CountdownAgent
  agent_args:
    hf_dataset_name: "Jiayi-Pan/Countdown-Tasks-3to4"
    split: "train"
    env_id: sums
  weight: 0.0
- agent_type: AIMEAgent
  agent_args: {}
  weight: 0.0
  evaluation_only: true
- agent_type: my_package.agents.MyAgent
  agent_args: {letters: 3}
  weight: 1
- agent_type: RemoteAgent
  agent_args: {env_server_host_port: "10.0.0.5:8000"}
  weight: 1
"""


def test_agents_of_the_examples_have_their_names_and_arguments_here(load):
    task = load(EXAMPLES).task
    shares = {share.key: share for share in task.shares}
    assert list(shares) == ["DAPOAgent", "GSM8KAgent", "sums", "MyAgent", "RemoteAgent"]
    assert [share.weight for share in task.trained] == [1, 2, 1, 1]
    assert [(share.key, share.name) for share in task.evaluated] == [("AIMEAgent", "megatron_rl")]
    assert shares["DAPOAgent"].args == {"agent": "DAPOAgent", "format_reward": 0.0}
    assert shares["GSM8KAgent"].args["partial_end_reward"] == 0.75
    assert shares["sums"].args["split"] == "train"
    assert (shares["MyAgent"].name, shares["MyAgent"].args) == ("my_package.agents:MyAgent", {"letters": 3})


def test_every_mistake_of_a_file_is_told_with_its_line(load):
    with pytest.raises(ConfigError) as refused:
        load("- agent_type: kopy\n- agent_type: copy\n  wieght: 1\n")
    first, second = str(refused.value).splitlines()
    assert "task.file: " in first
    assert "tasks.yaml:1: agent_type: kopy" in first
    assert "task.file: " in second
    assert "tasks.yaml:3: wieght: unknown key" in second
