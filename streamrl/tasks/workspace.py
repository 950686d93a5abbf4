"""The directory of one sample of a Harbor task: commands in it, and then its tests, each walled off.

    copy of environment/ ─▶ /app, writable ─▶ commands, one after another ─▶ tests/ at /tests ─▶ /logs/verifier/reward

Only files go from one command to the next: its processes end with it. No path in the directory is followed out here,
because what lies there is the policy's.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from streamrl.tasks.environment import EXACT, Score
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.harbor_folder import HarborFolder
from streamrl.tasks.python_tool import Limits, Mount, PythonTool
from streamrl.tasks.sandbox import NOBODY

FILE_SIZE = 64 << 20  # bytes of each file that a command or a test writes
PROCESSES = 512  # at once of all sandboxes together, where they are root's: one user runs them all
REWARD = 1 << 16  # bytes of a reward's file
MOST_FILES = 20_000  # in the directory, after a command
MOST_BYTES = 1 << 30  # in it, after a command

# The last one has this process's own Python.
PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{os.path.realpath(sys.base_prefix)}/bin"


class WorkspaceFull(ValueError):
    """The directory holds more than it may."""


class NotWritten(ValueError):
    """A file of the directory that could not be written: what a policy has put there may be in its way."""


class NoReward(ValueError):
    """The tests left no reward behind."""


class Workspace:
    """A directory, as long as the `with` lasts. It is filled, measured and removed in threads.

    Usage:
        async with Workspace(task, seconds=10) as workspace:
            await workspace.run("echo hello > greeting.txt")
            await workspace.score()
    """

    def __init__(self, task: HarborFolder, *, seconds: float) -> None:
        """seconds: of one command."""
        self._task = task
        self._seconds = seconds
        self._root = Path()
        self._copying = threading.Lock()  # a thread ends what it does, though nobody waits for it any more
        self._is_there = False

    async def __aenter__(self) -> Self:
        """Raises ScorerUnready where the task's files cannot be copied."""
        try:
            self._root = Path(tempfile.mkdtemp(prefix="streamrl-harbor-"))
        except OSError as error:
            raise ScorerUnready(f"no directory could be made: {error}") from None
        self._is_there = True
        try:
            await asyncio.to_thread(self._if_there, self._fill)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._remove))

    async def run(self, command: str) -> str:
        """What a shell command printed. Raises WorkspaceFull, NoWalls."""
        output = await self._shell(["bash", "-c", command], self._seconds, [], self._task.environment)
        await asyncio.to_thread(self._check_size)
        return output

    async def write(self, name: str, text: str) -> None:
        """Write a file of the directory: inside the walls, where its path leads nowhere else. Raises NotWritten."""
        content = text.encode(errors="replace")
        code = f"import pathlib\npathlib.Path({self._task.workdir!r}, {name!r}).write_bytes({content!r})"
        if said := await self._python(code, self._seconds, []):
            raise NotWritten(f"{name} was not written: {said.splitlines()[-1]}")

    async def score(self) -> Score:
        """Run the tests. Raises NoReward where they leave none, and ScorerUnready where they cannot be run."""
        task = self._task
        logs, tests = self._root / "logs", self._root / "tests"
        await asyncio.to_thread(self._if_there, _copy, task.folder / "tests", tests)
        mounts = [Mount(tests, "/tests"), Mount(logs, "/logs", writable=True)]
        variables = {**task.environment, **task.verifier_environment}
        output = await self._shell(["bash", "/tests/test.sh"], task.verifier_timeout, mounts, variables)
        return read_reward(logs / "verifier", output)

    def _if_there(self, function: Callable[..., None], *arguments: Path) -> None:
        """Copy into the directory, unless it is removed. Raises ScorerUnready."""
        try:
            with self._copying:
                if self._is_there:
                    function(*arguments)
        except OSError as error:  # no space, no descriptor, no such file any more: no answer has done that
            raise ScorerUnready(f"the files of {self._task.name} could not be copied: {error}") from None

    def _remove(self) -> None:
        with self._copying:
            self._is_there = False
            shutil.rmtree(self._root, ignore_errors=True)

    def _fill(self) -> None:
        directory = self._root / "app"
        directory.mkdir()
        (self._root / "logs" / "verifier").mkdir(parents=True)
        for source, below in self._task.copies:
            _copy(source, directory / below)
        _give_away(directory)
        _give_away(self._root / "logs")

    async def _shell(self, words: list[str], seconds: float, mounts: list[Mount], variables: dict[str, str]) -> str:
        given = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **variables}
        code = (
            "import subprocess, sys\n"
            f"sys.exit(subprocess.run({words!r}, cwd={self._task.workdir!r}, env={given!r}, "
            "stdin=subprocess.DEVNULL).returncode)"
        )
        return await self._python(code, seconds, mounts)

    async def _python(self, code: str, seconds: float, mounts: list[Mount]) -> str:
        limits = Limits(
            seconds=seconds, memory=self._task.memory << 20, file_size=FILE_SIZE, processes=PROCESSES, output=4096
        )
        directory = Mount(self._root / "app", self._task.workdir, writable=True)
        return await PythonTool(limits, parallel=1).run(code, [directory, *mounts])

    def _check_size(self) -> None:
        files = size = 0
        for folder, _, names in os.walk(self._root / "app"):
            files += 1 + len(names)
            size += sum(_size(Path(folder, name)) for name in names)
            if files > MOST_FILES or size > MOST_BYTES:
                raise WorkspaceFull(f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB in {self._task.workdir}")


def read_reward(folder: Path, output: str) -> Score:
    """What the tests wrote: reward.json, a number or named numbers, else reward.txt. Raises NoReward.

    output: what the tests printed, for the message. With names the reward is `reward`, or the only one.
    """
    text = _text(folder / "reward.json") or _text(folder / "reward.txt")
    if text is None:
        last = " ".join(output.split())[-100:] or "they printed nothing"
        raise NoReward(f"tests/test.sh wrote no /logs/verifier/reward.json or reward.txt: {last}")
    try:
        found: Any = json.loads(text)
        numbers = {str(name): float(value) for name, value in found.items()} if isinstance(found, dict) else {}
        if not isinstance(found, dict):
            reward = float(found)
        else:
            reward = numbers["reward"] if "reward" in numbers or len(numbers) != 1 else next(iter(numbers.values()))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NoReward(f"tests/test.sh wrote no reward: {type(error).__name__}") from None
    parts = {name: value for name, value in numbers.items() if name != "reward"}
    return Score(reward=reward, parts={EXACT: float(reward >= 1.0), **parts})


def _text(path: Path) -> str | None:
    """The file's text, cut; None where it is none. A link is none: what wrote it ran beside the policy's files."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read(REWARD).decode(errors="replace").strip() or None
        except OSError:
            return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _copy(source: Path, target: Path) -> None:
    """A file, or what is in a folder, as the sandbox's own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    _give_away(target)


def _give_away(folder: Path) -> None:
    """To nobody, as whom the sandbox runs where this process is root."""
    if os.getuid() != 0:
        return
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chown(Path(path, name), NOBODY, NOBODY, follow_symlinks=False)
