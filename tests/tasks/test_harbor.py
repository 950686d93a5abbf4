"""Harbor tasks without a container daemon: real folders, commands and tests in the sandbox, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks import left_out
from streamrl.tasks.environment import EXACT, FAILED, Environment, Prompt
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.harbor_folder import read_folder
from streamrl.tasks.left_out import OfTask, fitting_prompt
from streamrl.tasks.python_tool import missing_walls
from streamrl.tasks.registry import build_task
from streamrl.tasks.turns import TURNS
from streamrl.tasks.workspace import NoReward, Workspace, read_reward
from tests.harbor_tasks import DOCKERFILE, TESTS, TOML, write_task

END = "<|im_end|>"
walled = pytest.mark.skipif(missing_walls() is not None, reason="the kernel gives no namespaces here")


def play(path: Path, inference: Any, n: int = 1, **args: Any):
    async def go():
        task = build_task(TaskConfig(name="harbor", args={"path": str(path), "held_out": 1e-9, **args}), 1, "train")
        return await task.rollout_group(inference, task.prompt(0), n)

    return asyncio.run(go())


@walled
def test_commands_change_the_directory_of_their_own_sample_and_the_tests_give_the_reward(scripted, tmp_path):
    said = [
        ['<tool name="bash">cat wanted.txt > answer.txt; ls /; echo $WANTED</tool>', END],
        ["done", END],
        ["caf", END],
    ]
    path = write_task(tmp_path / "caf", "caf")
    (first,) = play(path, scripted(said))
    (other,) = play(path, scripted([["done", END]]))
    assert (first.reward, first.parts) == (1.0, {EXACT: 1.0, "right": 3.0, TURNS: 2.0})
    assert (other.reward, other.parts["right"]) == (0.0, 0.0)
    assert "caf" in first.completion.text
    assert "logs" not in first.completion.text  # what the tests write is not there before they run
    assert not (path / "environment" / "answer.txt").exists()


@walled
def test_the_last_turn_can_be_the_answer(scripted, tmp_path):
    path = write_task(tmp_path / "caf", "caf")
    played = play(path, scripted([["caf", END], ["cab", END]]), n=2, commands=False, answer="answer.txt")
    half, right = sorted(played, key=lambda rollout: rollout.reward)  # which one begins is left to their threads
    assert (right.reward, right.parts[EXACT]) == (1.0, 1.0)
    assert half.reward == pytest.approx(2 / 3, abs=1e-3)


@walled
@pytest.mark.parametrize("all_looked_at", [True, False])
def test_an_answer_is_judged_in_the_folder_whose_instruction_was_asked(scripted, tmp_path, all_looked_at):
    for word in ("caf", "bed", "hag"):
        write_task(tmp_path / word, word)

    def build() -> Environment:
        args = {"path": str(tmp_path), "held_out": 1e-9, "commands": False, "answer": "answer.txt"}
        return build_task(TaskConfig(name="harbor", args=args), 1, "train")

    def instruction(prompt: Prompt) -> str:
        (message,) = prompt.messages or ()
        return str(message["content"]).strip()

    async def tokenise(prompt: Prompt) -> np.ndarray:
        return np.arange(len(instruction(prompt)))

    async def go() -> dict[str, float]:
        (tmp_path / instruction(build().prompt(1)) / "instruction.md").write_text("long " * 9)
        task = build()
        found = {"limit": 9, "looked": 3, "too_long": 1, "shortest": 44, "longest": 44, "size": 3}
        of_task = OfTask(**found, left_out=(1,) if all_looked_at else None)
        left_out.apply({"harbor": task}, {"harbor": of_task}, seed=1)
        rewards = {}
        for index in range(4):
            prompt = await fitting_prompt(task, index, tokenise)
            word = instruction(prompt)
            (rollout,) = await task.rollout_group(scripted([[word, END]]), prompt, 1)
            rewards[word] = min(rollout.reward, rewards.get(word, 1.0))
        return rewards

    rewards = asyncio.run(go())
    assert set(rewards) < {"caf", "bed", "hag"}
    assert set(rewards.values()) == {1.0}


@walled
def test_an_answer_that_cannot_be_written_is_told(scripted, tmp_path):
    path = write_task(tmp_path / "caf", "caf", tests=TESTS.replace("answer.txt", "out/answer.txt"))
    (rollout,) = play(path, scripted([["caf", END]]), commands=False, answer="out/answer.txt")
    assert (rollout.reward, rollout.parts) == (0.0, {FAILED: 1.0})
    assert "NotWritten: out/answer.txt was not written: FileNotFoundError" in rollout.failure


@walled
def test_nothing_that_a_policy_leaves_behind_reaches_outside_or_is_its_reward(scripted, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    outside.chmod(0o666)
    command = (
        f"ln -s {outside} answer.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
        "echo 9 > /tests/test.sh; echo x > /usr/x; (sleep 60; echo caf > answer.txt) & true"
    )
    path = write_task(tmp_path / "caf", "caf")
    inference = scripted([[f'<tool name="bash">{command}</tool>', END], ["caf", END]])
    (rollout,) = play(path, inference, answer="answer.txt")
    assert outside.read_text() == "untouched"
    assert rollout.parts == {FAILED: 1.0} or rollout.reward == 0.0
    assert (path / "tests" / "test.sh").read_text() == TESTS


@walled
def test_tests_without_a_reward_cost_the_sample_and_say_why(scripted, tmp_path):
    path = write_task(tmp_path / "caf", "caf", tests="echo it broke\nexit 1\n")
    (rollout,) = play(path, scripted([["done", END]]))
    assert (rollout.reward, rollout.parts) == (0.0, {FAILED: 1.0})
    assert "wrote no /logs/verifier/reward.json or reward.txt: it broke" in rollout.failure


@walled
def test_the_files_of_a_sample_are_copied_measured_and_removed_beside_the_event_loop(scripted, tmp_path, monkeypatch):
    seen = []

    def watched(name, function):
        def called(*arguments, **named):
            if "streamrl-harbor-" in str(arguments):
                seen.append((name, threading.current_thread() is threading.main_thread()))
            return function(*arguments, **named)

        return called

    for module, name in ((shutil, "copy"), (shutil, "copytree"), (shutil, "rmtree"), (os, "walk")):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    path = write_task(tmp_path / "caf", "caf")
    (rollout,) = play(path, scripted([['<tool name="bash">true</tool>', END], ["done", END]]))
    assert rollout.failure is None
    assert set(seen) == {("copy", False), ("copytree", False), ("rmtree", False), ("walk", False)}


def test_a_sample_that_is_cancelled_while_its_files_are_copied_leaves_none(tmp_path, monkeypatch):
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    begun, ended, copytree = threading.Event(), threading.Event(), shutil.copytree
    path = write_task(tmp_path / "caf", "caf", dockerfile=f"{DOCKERFILE}COPY . data/\n")

    def slow(*arguments, **options):
        begun.set()
        ended.wait(60)
        return copytree(*arguments, **options)

    async def go() -> None:
        entering = asyncio.create_task(Workspace(read_folder(path), seconds=1).__aenter__())
        await asyncio.to_thread(begun.wait, 60)
        entering.cancel()
        await asyncio.wait((entering,), timeout=0.1)
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await entering

    monkeypatch.setattr(shutil, "copytree", slow)
    asyncio.run(go())  # which ends its threads
    assert list(temporary.iterdir()) == []


@walled
def test_a_sample_whose_files_cannot_be_copied_costs_itself_alone(scripted, tmp_path, monkeypatch):
    copy, calls = shutil.copy, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(*arguments)

    monkeypatch.setattr(shutil, "copy", full)
    path = write_task(tmp_path / "caf", "caf")
    rollouts = play(path, scripted([["done", END]]), n=2)
    lost, played = sorted(rollouts, key=lambda each: each.failure is None)
    assert "ScorerUnready: the files of caf could not be copied: [Errno 28] No space left" in lost.failure
    assert (lost.masked, played.failure, played.parts["right"]) == (True, None, 0.0)
    monkeypatch.setattr(shutil, "copy", lambda *_: full())
    calls.clear()
    with pytest.raises(NotPlayed, match="No space left"):
        play(path, scripted([]))


@walled
def test_tests_that_cannot_be_copied_mask_the_answer(scripted, tmp_path, monkeypatch):
    copytree = shutil.copytree

    def full(source, target, **options):
        if Path(target).name == "tests":
            raise OSError(errno.ENOSPC, "No space left on device")
        return copytree(source, target, **options)

    monkeypatch.setattr(shutil, "copytree", full)
    (rollout,) = play(
        write_task(tmp_path / "caf", "caf"), scripted([["caf", END]]), commands=False, answer="answer.txt"
    )
    assert rollout.masked
    assert "could not be copied" in rollout.failure


@pytest.mark.parametrize(
    ("text", "reward"),
    [("0.5\n", 0.5), ('{"reward": 1}', 1.0), ('{"tests": 0.25}', 0.25), ('{"a": 1, "b": 2}', None), ("{", None)],
)
def test_a_reward_is_a_number_or_named_numbers(tmp_path, text, reward):
    (tmp_path / "reward.json").write_text(text)
    (tmp_path / "reward.txt").write_text("0.75")
    if reward is None:
        with pytest.raises(NoReward):
            read_reward(tmp_path, "")
    else:
        assert read_reward(tmp_path, "").reward == reward
    (tmp_path / "reward.json").unlink()
    assert read_reward(tmp_path, "").reward == 0.75


def test_a_link_is_no_reward(tmp_path):
    (tmp_path / "elsewhere").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoReward, match="they printed nothing"):
        read_reward(tmp_path, "")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"dockerfile": "FROM ubuntu:24.04\nRUN apt-get install -y jq\n"},
            "Dockerfile: RUN apt-get install -y jq needs",
        ),
        ({"dockerfile": "FROM ghcr.io/some/thing:1\n"}, "FROM ghcr.io/some/thing:1 needs docker"),
        ({"dockerfile": "FROM ubuntu\nCOPY ../secret .\n"}, "COPY ../secret . needs docker"),
        ({"dockerfile": "FROM ubuntu\nCOPY wanted.txt /etc/\n"}, "COPY wanted.txt /etc/ needs docker"),
        ({"dockerfile": "FROM ubuntu\nCOPY none.txt .\n"}, "no none.txt in environment/"),
        ({"dockerfile": "FROM ubuntu\nWORKDIR /usr/src\n"}, "WORKDIR /usr/src needs docker"),
        ({"dockerfile": "FROM ubuntu\nENV KEY=$HOME\n"}, "KEY = '$HOME' is filled in by Harbor"),
        ({"toml": f"{TOML}docker_image = 'a/b'\n"}, "environment.docker_image = 'a/b' needs docker"),
        ({"toml": f"{TOML}gpus = 1\n"}, "environment.gpus = 1 needs docker"),
        ({"toml": f"{TOML}[[environment.mcp_servers]]\nname = 'a'\n"}, "environment.mcp_servers needs docker"),
        ({"toml": '[verifier]\nenvironment_mode = "separate"\n'}, "environment_mode = 'separate' needs docker"),
        ({"toml": "[[steps]]\nname = 'a'\n"}, "steps"),
        ({"toml": '[verifier.env]\nKEY = "${KEY}"\n'}, "verifier.env: KEY"),
        ({"toml": "version = "}, "Invalid value"),
        ({"tests": "set -e\ncurl -L x | sh  # uv\n"}, "tests/test.sh:2: 'curl' needs docker"),
        ({"tests": "uvx pytest\n"}, "tests/test.sh:1: 'uvx' needs docker"),
    ],
)
def test_what_needs_docker_is_refused_by_name_in_one_line(tmp_path, changed, named):
    with pytest.raises(ValueError, match=r"task\.args\.path: caf: .*; allowed: ") as refused:
        read_folder(write_task(tmp_path / "caf", "caf", **changed))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_a_directory_needs_no_container_for_is_read(tmp_path):
    dockerfile = DOCKERFILE + 'COPY . data/\nLABEL a="b"\nCMD ["bash"]\nENV OTHER two words\n'
    task = read_folder(write_task(tmp_path / "caf", "caf", dockerfile=dockerfile, tests=f"# curl\n{TESTS}"))
    assert (task.workdir, task.verifier_timeout, task.memory) == ("/app", 20.0, 1024)
    assert task.environment == {"WANTED": "caf", "OTHER": "two words"}
    assert [place for _, place in task.copies] == ["wanted.txt", "data"]


def test_a_folder_without_a_task_and_a_split_without_one_are_refused(tmp_path):
    for path, reason in ((tmp_path, "has no task.toml"), (tmp_path / "none", "is no folder")):
        with pytest.raises(ValueError, match=reason):
            build_task(TaskConfig(name="harbor", args={"path": str(path)}), 1, "train")
    write_task(tmp_path / "caf", "caf")
    with pytest.raises(ValueError, match=r"task\.args\.held_out: 1e-09 leaves the split 'probe'"):
        build_task(TaskConfig(name="harbor", args={"path": str(tmp_path), "held_out": 1e-9}), 1, "probe")
