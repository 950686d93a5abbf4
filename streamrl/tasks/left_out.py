"""The prompts that a run leaves out, or cuts, because they are too long, and which prompt an index means then.

    the whole data set was looked at   index 0, 1, 2, ... of what fits: of prompts 0 1 2 3 without 1, that is 0 2 3, and
                                       then each epoch the same ones in another order
    a sample of it, or no end          the prompt of the index; where that is too long, of index + STRIDE, of ...

It is decided before a run starts (`preflight/prompts.py`) and kept in RUN/left_out.json, where every process and every
resume reads which prompt an index means. The replay service counts indices and knows nothing of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from streamrl.config.file import ConfigError
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Environment, Prompt
from streamrl.tasks.order import item_at
from streamrl.whole_files import write_whole

FILE = "left_out.json"

# From an index whose prompt is too long to the one that is asked in its place: more than a run asks for, and a prime,
# so that a task that counts round its prompts by itself has another one there.
STRIDE = 15_485_863

# Places that are looked at for one index. Where half of the prompts are too long, one index in 2^64 has no prompt.
TRIES = 64

# Token ids of a prompt, with those of its images.
Tokenise = Callable[[Prompt], Awaitable[np.ndarray]]


class OfTask(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one task's prompts."""

    limit: int  # tokens that a prompt may have
    looked: int  # prompts that were looked at
    too_long: int  # of them
    shortest: int  # tokens of the shortest of those that are too long; 0 for none, as the next one
    longest: int  # tokens of the longest of them
    size: int | None  # prompts of an epoch, those that are left out too; None: the task has no end
    left_out: tuple[int, ...] | None  # their indices in the first epoch, ascending; None: not all were looked at
    whole: bool | None = None  # were all looked at? None: as left_out says
    cut: str | None = None  # the side at which they are cut, of which none is left out then

    @property
    def fitting(self) -> int | None:
        """Prompts of one epoch that fit; None: no end."""
        return self.size if self.size is None or self.left_out is None else self.size - len(self.left_out)

    def line(self, name: str) -> str:
        """What the user reads where some are left out."""
        whole = self.left_out is not None if self.whole is None else self.whole
        seen = f"{self.looked:,} prompts" if whole else f"a sample of {self.looked:,} prompts"
        done = "left out" if self.cut is None else f"cut ({self.cut})"
        return (
            f"task.max_prompt_tokens: {self.too_long:,} of {seen} of {name} are {done}: above {self.limit:,} tokens, "
            f"the longest has {self.longest:,}"
        )


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """What every task of a run leaves out, by its label: of what is trained, and of the splits that are evaluated."""

    trained: dict[str, OfTask] = {}
    evaluated: dict[str, OfTask] = {}

    @property
    def of_other_splits(self) -> dict[str, OfTask]:
        """Of prompts of the trained tasks that nobody has looked at: each is counted when it is asked."""
        return {name: msgspec.structs.replace(found, left_out=None) for name, found in self.trained.items()}

    def lines(self) -> Iterator[str]:
        """A line for each task that leaves prompts out."""
        for name, found in self.trained.items():
            if found.too_long:
                yield found.line(name)
        for name, found in self.evaluated.items():
            if found.too_long:
                yield found.line(f"{name} (held out)")


class Fitting:
    """The prompts of a task that fit.

    Usage:
        fitting = Fitting(OfTask(size=4, left_out=(1,), ...), seed=1)
        fitting.size  # 3
        prompt = await fitting.prompt(task, 1, tokenise)  # prompt 2 of the task
    """

    def __init__(self, found: OfTask, seed: int) -> None:
        self._found = found
        self._seed = seed
        self._before = [index - place for place, index in enumerate(found.left_out or ())]  # what fits before each

    @property
    def size(self) -> int | None:
        """Prompts of one epoch; None: no end."""
        return self._found.fitting

    async def prompt(self, task: Environment, index: int, tokenise: Tokenise) -> Prompt:
        """The prompt that `index` means, with the task's own index: the same one on any machine.

        Raises ValueError where there is none.
        """
        if self._found.left_out is not None:
            return await task.fetch(self._place(index))
        for step in range(TRIES):
            prompt = await task.fetch(index + step * STRIDE)
            if len(await tokenise(prompt)) <= self._found.limit:
                return prompt
        raise ValueError(f"prompt {index}: {TRIES} prompts have more than {self._found.limit} tokens")

    def _place(self, index: int) -> int:
        """Where the prompt of an index is in the task's first epoch: that of the first one has its own order."""
        assert self.size is not None
        item = index if index < self.size else item_at(index, self.size, self._seed)
        return item + bisect_right(self._before, item)


def apply(tasks: Mapping[str, Environment], found: Mapping[str, OfTask], seed: int) -> None:
    """Leave prompts out of tasks, or cut them, by their labels. `seed`: of the order of further epochs."""
    for name, task in tasks.items():
        of_task = found.get(name)
        if of_task is None:
            continue
        if of_task.cut is not None:
            task.cut = Cut(of_task.cut, of_task.limit)
        elif of_task.left_out is None or of_task.left_out:
            task.fitting = Fitting(of_task, seed)


async def fitting_prompt(task: Environment, index: int, tokenise: Tokenise) -> Prompt:
    """The prompt that `index` means, of those that fit; its own index is that by which the task knows it."""
    return await task.fetch(index) if task.fitting is None else await task.fitting.prompt(task, index, tokenise)


def fitting_size(task: Environment) -> int | None:
    """Prompts of one epoch that fit; None: no prompt comes back."""
    return task.size if task.fitting is None else task.fitting.size


def load(run_folder: Path) -> LeftOut:
    """What a run leaves out; nothing where it has no record of it, as runs from before. Raises ConfigError."""
    file = run_folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=LeftOut)
    except (FileNotFoundError, NotADirectoryError):
        return LeftOut()
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}; allowed: the file that the run was started with, or --fresh") from None


def save(run_folder: Path, found: LeftOut) -> None:
    """Record it, whole or not at all."""
    write_whole(run_folder / FILE, msgspec.json.encode(found))
