"""A reward model as a process: stopped, killed and started again, while a worker waits for its scores."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import tiny_model, tiny_reward_model
from streamrl.observe.events import Events
from streamrl.places import load_run
from streamrl.reward_model.client import RewardModels
from streamrl.reward_model.wire import read_address
from streamrl.tasks.environment import Prompt

CONFIG = """
run: {{name: run, folder: {folder}}}
model: {{path: {folder}/model}}
task: {{name: copy, rewards: [{{name: reward_model}}]}}
reward_model: {{path: {folder}/reward, timeout: 2, patience: 200, retry: 0.2}}
"""
DEADLINE = 200.0


class Told(Events):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def emit(self, event: str, /, **fields) -> None:
        self.reasons.append(fields["reason"])


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "streamrl.cli", "reward-model", *words])


def wait_for(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE)
def test_a_group_waits_for_one_that_is_stopped_and_for_the_successor_of_one_that_is_killed(tmp_path):
    tiny_model.make(tmp_path / "model")
    tiny_reward_model.make(tmp_path / "reward")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    run_folder: Path = tmp_path / "run"
    processes = [start([str(tmp_path / "config.yaml")])]
    told = Told()

    async def go() -> None:
        models = RewardModels(load_run(run_folder), run_folder, told)

        async def scores() -> list[float | str]:
            return await models.scores(Prompt(index=0, text="caf="), ["caf", "b"])

        try:
            expected = await scores()
            os.kill(processes[0].pid, signal.SIGSTOP)
            waiting = asyncio.create_task(scores())
            while not any("no reply in 2 s" in reason for reason in told.reasons):
                await asyncio.sleep(0.05)
            os.kill(processes[0].pid, signal.SIGCONT)
            assert await waiting == expected
            processes[0].kill()
            processes[0].wait()
            waiting = asyncio.create_task(scores())
            processes.append(await asyncio.to_thread(start, ["--run-folder", str(run_folder)]))
            assert await waiting == expected
        finally:
            await models.close()

    try:
        wait_for(lambda: read_address(run_folder, 0) is not None)
        asyncio.run(go())
        processes[1].terminate()
        assert processes[1].wait(timeout=DEADLINE) == 0
        assert read_address(run_folder, 0) is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
