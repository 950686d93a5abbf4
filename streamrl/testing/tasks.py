"""What a task must do: the same prompts on every machine, no probe among those that are trained, a number an answer.

from streamrl.testing.tasks import TaskConformance

class TestBackwards(TaskConformance):
    name = "backwards.py:Backwards"
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from pydantic import BaseModel

from streamrl.choices import TASKS
from streamrl.config.task import ScoringConfig, TaskConfig, TaskShare
from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import Completion, Environment, Message, Prompt, Rollout, message_text
from streamrl.tasks.hosted import Split, host_task
from streamrl.tasks.registry import build_task
from streamrl.testing.declarations import Conformance, absolute
from streamrl.types import PolicyVersion, VersionSpan

Result = TypeVar("Result")
PROMPTS = 100  # of a split without an epoch
FAR = (7, 0, 3, 1 << 20)
LONGEST_EPOCH = 3000  # prompts; of a longer epoch only the first PROMPTS are asked
WRONG = "no answer"
STRANGE = ("", " ", "-", "\x00", "ä" * 999, "1e999", "[" * 5000, "<answer>", "\\boxed{", WRONG)


class TaskConformance(Conformance):
    """Give `name`, and the arguments that the task needs."""

    kind = TASKS
    args: ClassVar[dict[str, Any]] = {}
    splits: ClassVar[tuple[Split, ...]] = ("train", "probe")

    def right(self, prompt: Prompt) -> Sequence[str]:
        """The policy's turns that are worth more than WRONG; none where no answer is."""
        return () if prompt.answer is None else (prompt.answer,)

    @property
    def options(self) -> type[BaseModel]:
        assert issubclass(self.declaration.Arguments, TaskArguments)
        return self.declaration.Arguments

    def test_an_unknown_argument_is_refused_in_one_line(self) -> None:
        with pytest.raises(ValueError, match=r"^task\.args\.no_such_argument: unknown key.*$"):
            build_task(self._share(no_such_argument=1), 1, self.splits[0])

    def test_every_split_has_prompts_and_each_has_its_index(self) -> None:
        for split in self.splits:
            for index, prompt in enumerate(self._prompts(split, PROMPTS)):
                assert isinstance(prompt, Prompt)
                assert prompt.index == index

    def test_the_prompts_are_the_same_in_another_process(self) -> None:
        code = (
            "import asyncio; from streamrl.config.task import TaskShare\n"
            "from streamrl.testing.tasks import asked, content\n"
            f"share = TaskShare.model_validate_json({self._share().model_dump_json()!r})\n"
            f"for split in {self.splits!r}: print([content(p) for p in asyncio.run(asked(share, split, {FAR!r}))])"
        )
        here = []
        for split in self.splits:
            backwards = asyncio.run(asked(self._share(), split, FAR[::-1]))
            here.append(str([content(prompt) for prompt in backwards[::-1]]))
        assert _output(code).splitlines() == here

    def test_no_probe_is_a_prompt_that_is_trained(self) -> None:
        prompts = [{content(prompt) for prompt in self._epoch(split)} for split in self.splits]
        assert len(prompts) == 1 or not set.intersection(*prompts), "a prompt is in both splits"

    def test_each_epoch_has_every_prompt(self) -> None:
        for split in self.splits:
            size = build_task(self._share(), 1, split).size
            if size is not None and size <= LONGEST_EPOCH:
                prompts = [content(prompt) for prompt in self._prompts(split, 2 * size)]
                assert sorted(prompts[:size]) == sorted(prompts[size:]), f"epochs of {split} differ"

    def test_every_answer_gets_a_number_whatever_it_says(self) -> None:
        async def play(task: Environment, prompt: Prompt) -> tuple[float, list[Rollout]]:
            return task.lowest_reward, await task.rollout_group(Policy(STRANGE), prompt, len(STRANGE))

        lowest, rollouts = self._at_work(play)
        assert len(rollouts) == len(STRANGE)
        for rollout in rollouts:
            assert rollout.failure is None, f"{rollout.completion.text!r}: the scorer raised {rollout.failure}"
            assert math.isfinite(rollout.reward)
            assert rollout.reward >= lowest, f"reward {rollout.reward} is below lowest_reward={lowest}"
            assert all(math.isfinite(part) for part in rollout.parts.values())

    def test_a_right_answer_is_worth_more_than_a_wrong_one(self) -> None:
        async def play(task: Environment, prompt: Prompt) -> list[float]:
            said = [turns for turns in (self.right(prompt), (WRONG,)) if turns]
            return [(await task.rollout_group(Policy(turns), prompt, 1))[0].reward for turns in said]

        rewards = self._at_work(play)
        if len(rewards) < 2:
            pytest.skip("the prompt has no right answer")
        assert rewards[0] > rewards[1]

    def _share(self, **more: Any) -> TaskShare:
        return TaskShare(name=absolute(self.name), args={**self.args, **more})

    def _epoch(self, split: Split) -> list[Prompt]:
        size = build_task(self._share(), 1, split).size
        return self._prompts(split, size if size is not None and size <= LONGEST_EPOCH else PROMPTS)

    def _prompts(self, split: Split, count: int) -> list[Prompt]:
        return asyncio.run(asked(self._share(), split, range(count)))

    def _at_work(self, use: Callable[[Environment, Prompt], Coroutine[Any, Any, Result]]) -> Result:
        """What `use` makes of the task and a prompt of it, where a worker runs it."""

        async def work() -> Result:
            task = await host_task(self._share(), 1, self.splits[0], TaskConfig(scoring=ScoringConfig(processes=1)))
            try:
                return await use(task, await task.fetch(0))
            finally:
                await task.close()

        return asyncio.run(work())


async def asked(share: TaskShare, split: Split, indices: Iterable[int]) -> list[Prompt]:
    """These prompts of a task that is built for it."""
    task = build_task(share, 1, split)
    prompts = [await task.fetch(index) for index in indices]
    await task.close()
    await task.close()  # may be called twice
    return prompts


class Policy:
    """A policy that gives these answers one after the other, again and again; a token is a byte."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = itertools.cycle(answers)

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        asked = prompt if isinstance(prompt, np.ndarray) else self.prompt_ids(prompt)
        return [_completion(asked, text) for text in itertools.islice(self._answers, n)]

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        return _ids(prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt)))

    def added_ids(
        self,
        said: Sequence[Message],
        added: str | Sequence[Message],
        last: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        return self.prompt_ids(added)


def _completion(prompt_ids: np.ndarray, text: str) -> Completion:
    ids = np.append(_ids(text), np.int32(256))  # the end
    return Completion(
        text=text,
        prompt_ids=prompt_ids,
        output_ids=ids,
        logprobs=np.full(len(ids), -1, np.float32),
        spans=(VersionSpan(PolicyVersion(0), 0, len(ids)),),
        finish_reason="stop",
    )


def _ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def content(prompt: Prompt) -> str:
    """What the policy is asked."""
    return repr((prompt.text, prompt.messages, prompt.images))


def _output(code: str) -> str:
    # Sets and hashes have another order there.
    environment = os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    environment["PYTHONPATH"] = ":".join(path or "." for path in sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
