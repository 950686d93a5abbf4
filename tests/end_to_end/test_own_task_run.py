"""The task of `howto-task.md` and the tool of `tasks.md`, written to files as the pages show them, and trained."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys

import pytest

from streamrl.config import file as config_file
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.registry import build_task
from tests.documented_commands import ROOT, blocks
from tests.own_choices import write_files

STEPS = 3
SMALL = (f"run.steps={STEPS}", "generate.group_size=2", "generate.groups_in_flight=4", "replay.groups_per_step=2")
DEADLINE = 500.0  # seconds; a start of SGLang on two busy cores may take a hundred


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_model):
    """What a user has: a model, the configuration of the quickstart, and the files that the pages show."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(page: str, language: str, part: str) -> str:
    """The one block of the page that has `part`."""
    (text,) = [text for kind, text in blocks(ROOT / "docs" / page) if kind == language and part in text]
    return text


def command(page: str, part: str) -> list[str]:
    """The words of the page's one `streamrl train` that has `part`."""
    lines = block(page, "bash", part).replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if part in line]
    return shlex.split(line)


def train(folder, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *words[1:], *SMALL],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = [entry for entry in (folder / "runs").iterdir() if entry.is_dir()]
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("length", [2, 3])
def test_the_task_of_the_page_has_prompts_in_both_splits_and_none_in_two(folder, length):
    _, _, config, *overrides = command("howto-task.md", "run.name=backwards")
    task = config_file.load(folder / config, [*overrides, f"task.args.length={length}"]).task
    asked = {}
    for split in ("train", "probe"):
        built = build_task(task, seed=1, split=split)
        prompts = [built.prompt(index) for index in range(built.size)]
        asked[split] = {prompt.text for prompt in prompts}
        assert all(prompt.text == prompt.answer[::-1] + "=" for prompt in prompts)
        assert len(asked[split]) == built.size > 0
    assert not asked["train"] & asked["probe"]
    assert len(asked["train"] | asked["probe"]) == 8**length


def test_a_split_of_the_task_without_prompts_is_refused_in_one_line(folder):
    task = config_file.load(None, ["task.name=backwards.py:Backwards", "task.args={held_out: 1.0e-9}"]).task
    with pytest.raises(ValueError, match=r"task\.args\.held_out: 1e-09 leaves the split 'probe' without a word"):
        build_task(task, seed=1, split="probe")


def test_the_tool_of_the_page_is_offered_and_answers(folder):
    (folder / "task.yaml").write_text(block("tasks.md", "yaml", "tools.py:Populations"))
    task = build_task(config_file.load(folder / "task.yaml").task, seed=1, split="train")
    tool = task._tools["Populations"]

    async def called():
        try:
            return await tool.call("Rome")
        finally:
            await task.close()

    assert "Populations: the inhabitants of a city" in task.prompt(0).messages[0]["content"]
    assert asyncio.run(called()) == "2800000"


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE + 100)
def test_the_task_of_the_page_trains(folder):
    train(folder, command("howto-task.md", "run.name=backwards"))


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE + 100)
def test_the_tool_of_the_page_trains(folder):
    train(folder, command("tasks.md", "run.name=cities"))
