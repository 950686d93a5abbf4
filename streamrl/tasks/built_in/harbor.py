"""The task `harbor`: folders of Harbor tasks that run without a container daemon.

instruction ─▶ policy ─▶ shell command in the directory ─▶ its output ─▶ policy ─▶ ... ─▶ tests/test.sh ─▶ reward
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from pydantic import Field, model_validator

from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import (
    Completion,
    Environment,
    Inference,
    Message,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.episodes import begun, together
from streamrl.tasks.failures import INFRASTRUCTURE, ScorerUnready
from streamrl.tasks.harbor_folder import HarborFolder, read_folders
from streamrl.tasks.order import is_held_out, item_at
from streamrl.tasks.python_tool import NoWalls, missing_walls
from streamrl.tasks.tool_calls import ToolCall, describe_tools, parse_calls
from streamrl.tasks.turns import TURNS
from streamrl.tasks.workspace import Workspace

SHELL = "bash"  # the one tool


class HarborArguments(TaskArguments):
    """Arguments of `harbor`."""

    path: Path = Field(description="folder of a Harbor task, or of several")
    commands: bool = Field(True, description="tell the policy of a shell in the task's directory, and run its calls")
    answer: str | None = Field(
        None,
        pattern=r"^[\w.-][\w./-]*$",
        description="file of the directory that gets the last turn's text; null: none",
    )
    max_turns: int = Field(16, ge=1, description="turns of the policy")
    seconds: float = Field(10.0, gt=0, description="seconds that one command may take")
    role: str = Field("tool", description="role of a command's output, as the model's chat template calls it")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    parallel: int = Field(2, ge=1, description="commands or tests at once")

    @model_validator(mode="after")
    def _has_an_effect(self) -> HarborArguments:
        if not self.commands and self.answer is None:
            raise ValueError("answer: null is not allowed without commands; allowed: a file's name")
        return self


class Harbor(Environment):
    """Reward: what the task's tests write. Each sample has a copy of the task's directory."""

    Arguments = HarborArguments
    has_turns = True

    def __init__(self, arguments: HarborArguments, seed: int, split: str) -> None:
        """Raises ValueError, with one line, for a task that needs docker, and where there are no walls."""
        self.infrastructure = (*INFRASTRUCTURE, NoWalls)
        self._arguments = arguments
        self._seed = seed
        folders = read_folders(arguments.path)
        held_out = split == "probe"
        self._tasks = [task for task in folders if is_held_out(task.name, arguments.held_out) == held_out]
        self.size = len(self._tasks)
        if not self._tasks:
            share = arguments.held_out
            raise ValueError(f"{ARGUMENTS}.held_out: {share} leaves the split {split!r} of {arguments.path} empty")
        if (missing := missing_walls()) is not None:
            raise ValueError(f"{ARGUMENTS}.path: no command is run here ({missing}); allowed: with namespaces")
        self._places = asyncio.Semaphore(arguments.parallel)

    def prompt(self, index: int) -> Prompt:
        """The task's instruction, and what the shell is."""
        task = self._task(index)
        shell = describe_tools([(SHELL, f"runs a shell command in {task.workdir}")])
        if not self._arguments.chat:
            text = f"{shell}\n{task.instruction}" if self._arguments.commands else task.instruction
            return Prompt(index=index, text=text)
        before = [Message(role="system", content=shell)] if self._arguments.commands else []
        return Prompt(index=index, messages=(*before, Message(role="user", content=task.instruction)))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The judgement of one answer without commands."""
        async with Workspace(self._task(prompt.index), seconds=self._arguments.seconds) as workspace:
            return await self._score(workspace, completion)

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where no sample gets its directory."""
        return begun(await together(self._play(inference, prompt) for _ in range(n)))

    def _task(self, index: int) -> HarborFolder:
        return self._tasks[item_at(index, len(self._tasks), self._seed)]

    async def _play(self, inference: Inference, prompt: Prompt) -> Rollout:
        """One sample. Errors of `inference` propagate, those of its directory, commands and tests cost the reward."""
        conversation = Conversation(inference, prompt)
        async with contextlib.AsyncExitStack() as stack:
            try:
                workspace = await stack.enter_async_context(
                    Workspace(self._task(prompt.index), seconds=self._arguments.seconds)
                )
            except ScorerUnready as error:
                return self.unscored(prompt, conversation.completion, error)
            while True:
                await conversation.generate()
                if conversation.ended:
                    return Rollout(completion=conversation.completion, reward=0.0)
                try:
                    if await self._goes_on(workspace, conversation):
                        continue
                    score = await self._score(workspace, conversation.turns[-1])
                except Exception as error:  # the policy for what a policy does to its directory: count, log, go on
                    return self.unscored(prompt, conversation.completion, error)
                parts = {**score.parts, TURNS: float(len(conversation.turns))}
                return Rollout(completion=conversation.completion, reward=score.reward, parts=parts)

    async def _goes_on(self, workspace: Workspace, conversation: Conversation) -> bool:
        """Run the commands of the last turn; False where it has none, or is the last."""
        calls = parse_calls(conversation.turns[-1].text) if self._arguments.commands else []
        if not calls or len(conversation.turns) == self._arguments.max_turns:
            return False
        outputs = [await self._answer(workspace, call) for call in calls]
        if self._arguments.chat:
            conversation.add([Message(role=self._arguments.role, content=output) for output in outputs])
        else:
            conversation.add("".join(f"\n<result>{output}</result>\n" for output in outputs))
        return True

    async def _answer(self, workspace: Workspace, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        if call.name != SHELL:
            return f"error: no tool {call.name!r}; there is {SHELL}"
        async with self._places:
            return await workspace.run(call.argument)

    async def _score(self, workspace: Workspace, last: Completion) -> Score:
        async with self._places:
            if self._arguments.answer is not None:
                await workspace.write(self._arguments.answer, last.text)
            score = await workspace.score()
        check_reward(score)
        return score
