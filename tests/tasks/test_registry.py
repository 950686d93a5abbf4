"""Tasks by name, alone and in a mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import file as config_file
from streamrl.config.task import TaskConfig
from streamrl.tasks.registry import build_task


def test_a_mix_has_one_environment_for_each_weighted_label() -> None:
    mix = [
        {"name": "copy", "weight": 2},
        {"label": "long", "name": "copy", "args": {"length": 5}},
        {"name": "successor", "weight": 0},
    ]
    shares = TaskConfig.model_validate({"mix": mix}).trained
    tasks = {share.key: build_task(share, seed=1, split="train") for share in shares}
    assert list(tasks) == ["copy", "long"]
    assert len(tasks["copy"].prompt(0).answer or "") == 3
    assert len(tasks["long"].prompt(0).answer or "") == 5


def test_a_run_without_a_mix_has_its_one_task() -> None:
    assert [share.key for share in TaskConfig(name="successor").trained] == ["successor"]


OWN = """
from pydantic import Field
from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import Environment, Prompt, Score


class WordsArguments(TaskArguments):
    word: str = Field("face", description="what is asked")


class Words(Environment):
    Arguments = WordsArguments

    def __init__(self, arguments, seed, split):
        self.given = (arguments.word, seed, split)

    def prompt(self, index):
        return Prompt(index=index, text=self.given[0])

    async def score(self, prompt, completion):
        return Score(reward=0.0)


class NoTask:
    pass
"""


@pytest.fixture(params=["own_tasks", "{folder}/own_tasks.py"])
def own(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, by its dotted name and by its file."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return request.param.format(folder=tmp_path)


def test_a_class_of_the_users_is_a_task_with_arguments_of_its_own(own: str) -> None:
    config = TaskConfig(name=f"{own}:Words", args={"word": "bead"})
    task = build_task(config, seed=3, split="probe")
    assert task.given == ("bead", 3, "probe")  # type: ignore[attr-defined]
    assert [share.key for share in config.trained] == ["Words"]  # in tickets and metrics


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        ("Words", {"wort": "bead"}, "task.args.wort: unknown key .* nearest known key: task.args.word"),
        ("NoTask", {}, "task.name: .*:NoTask is no subclass of streamrl.tasks.environment.Environment"),
        ("Worms", {}, "task.name: .*:Worms cannot be loaded: ValueError: .* has no class 'Worms'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(own: str, name: str, args: dict[str, str], line: str) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        build_task(TaskConfig(name=f"{own}:{name}", args=args), seed=1, split="train")
    assert "\n" not in str(refused.value)


def test_a_name_that_is_neither_a_task_nor_a_path_is_refused_with_both() -> None:
    with pytest.raises(config_file.ConfigError) as refused:
        config_file.load(None, ["task.name=copie"])
    assert str(refused.value).startswith("override task.name: copie is not allowed; allowed: one of agent, ")
    assert "package.module:Class or path/file.py:Class; nearest known value: copy" in str(refused.value)
