"""A task of the user's as the worker sees it: the class runs in processes of its own (`host_pool.py`).

    one turn         the worker asks the policy ─▶ `score` of each answer, or `score_all`, in any process
    its own course   `rollout_group` in one process, from the first to the last turn; the policy is asked over the pipe

What is not the user's runs in the worker's event loop, and so does a class that says of itself that it never blocks
(`Environment.runs_inline`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks import parsing
from streamrl.tasks.environment import Completion, Environment, Inference, Prompt, Rollout, Score
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerRaised, ScorerUnready
from streamrl.tasks.host_pool import HostPool
from streamrl.tasks.host_wire import OWN, About, Call, Judgement, Method, Task
from streamrl.tasks.registry import build_task, own_share
from streamrl.tasks.turns import Observation, TurnByTurn

Split = Literal["train", "probe"]

Check = Callable[[str, Environment], None]  # of a task and its label


async def host_task(share: TaskConfig | TaskShare, seed: int, split: Split, run: TaskConfig) -> Environment:
    """As `build_task`, told of its run, with a class of the user's in processes of its own. `close` it.

    run: `task` of the configuration, of which `scoring` and `parsing.KEYS` count. Raises ValueError as `build_task`
    does, and ScorerUnready where no process can be made ready in time.
    """
    own = own_share(share)
    if own is None:  # in a thread: a task may read files, or start a process, and the worker goes on meanwhile
        return await asyncio.to_thread(_told, share, seed, split, run)
    told = run.model_dump(include=set(parsing.KEYS))
    task = Task(share=own.model_dump(), run=told, seed=seed, split=split, timeout=run.scoring.timeout)
    pool = HostPool(task, own.name.rpartition(":")[2], run.scoring)
    try:
        about = await pool.about()
        if about.inline:
            await pool.close()
            return _told(share, seed, split, run)
        hosted = HostedTurns(pool, about) if about.max_turns else Hosted(pool, about)
        return _told(share, seed, split, run, hosted)
    except BaseException:
        await pool.close()
        raise


def _told(
    share: TaskConfig | TaskShare, seed: int, split: Split, run: TaskConfig, own: Environment | None = None
) -> Environment:
    """As `build_task`, told of its run."""
    task = build_task(share, seed, split, own)
    parsing.apply(task, run)
    return task


async def host_tasks(shares: Iterable[TaskShare], seed: int, split: Split, run: TaskConfig) -> dict[str, Environment]:
    """The environments of several tasks, by their labels. Raises as `host_task` does; then none is left."""
    tasks: dict[str, Environment] = {}
    try:
        for share in shares:
            tasks[share.key] = await host_task(share, seed, split, run)
    except BaseException:
        await close_tasks(tasks)
        raise
    return tasks


async def close_tasks(tasks: dict[str, Environment]) -> None:
    """Close all of them."""
    await asyncio.gather(*(task.close() for task in tasks.values()))


def check_tasks(
    shares: Iterable[TaskShare], seed: int, split: Split, run: TaskConfig, check: Check | None = None
) -> None:
    """Load every task once, a class of the user's in a process of its own, `check` it, and let go of it.

    Raises ValueError, with one line that begins with the key, and what `check` raises.
    """

    async def load() -> None:
        tasks = await host_tasks(shares, seed, split, run)
        try:
            for name, task in tasks.items():
                if check is not None:
                    check(name, task)
        finally:
            await close_tasks(tasks)

    try:
        asyncio.run(load())
    except ScorerUnready as error:
        raise ValueError(f"task.name: {error}") from None


class Hosted(Environment):
    """A task of the user's whose class runs elsewhere."""

    def __init__(self, pool: HostPool, about: About) -> None:
        """`about`: what the class says of itself."""
        self.size, self.lowest_reward = about.size, about.lowest_reward
        self.has_turns, self.asks_itself = about.has_turns, about.asks_itself
        self.infrastructure = tuple(
            kind for kind in (ScorerLate, ScorerLost, ScorerUnready) if kind.__name__ in about.masked
        )
        self.pool = pool
        self._about = about

    @property
    def judges_groups(self) -> bool:
        return self._about.judges_groups

    def prompt(self, index: int) -> Prompt:
        """Raises TypeError: `await fetch(index)` asks the process."""
        raise TypeError("a hosted task makes its prompts elsewhere: await fetch(index)")

    async def fetch(self, index: int) -> Prompt:
        done = await self.pool.call(Call(method="prompt", index=index))
        assert done.prompt is not None
        return replace(done.prompt, messages=None if done.prompt.messages is None else tuple(done.prompt.messages))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Raises ScorerRaised for what the class raises."""
        done = await self.pool.call(_call("score", prompt, [completion]))
        return _score(done.judgements[0])

    async def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        if not self._about.scores_all:
            return await super().score_all(prompt, completions)
        try:
            done = await self.pool.call(_call("score_all", prompt, completions))
        except Exception as error:  # the policy for foreign scorers: count, log, go on
            return [self.unscored(prompt, completion, error) for completion in completions]
        judged = zip(completions, done.judgements, strict=True)
        return [_rollout(completion, judgement) for completion, judgement in judged]

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        if not self._about.plays:
            return await super().rollout_group(inference, prompt, n)
        call = _call("rollout_group", prompt, [], size=n)
        return (await self.pool.call(call, inference=inference, again=False)).rollouts

    async def close(self) -> None:
        await self.pool.close()


class HostedTurns(Hosted, TurnByTurn):
    """One of several turns. What a trainer elsewhere sends turn by turn goes to one process a prompt."""

    def __init__(self, pool: HostPool, about: About) -> None:
        super().__init__(pool, about)
        self.max_turns = about.max_turns

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> Observation | None:
        done = await self.pool.call(_call("observation", prompt, turns), place=prompt.index)
        return done.messages if done.text is None else done.text

    async def score_turns(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        done = await self.pool.call(_call("score_turns", prompt, turns), place=prompt.index)
        return _score(done.judgements[0])

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        return await self.score_turns(prompt, turns)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        return await self.score_turns(prompt, [completion])


def _call(method: Method, prompt: Prompt, completions: Sequence[Completion], size: int = 0) -> Call:
    """The prompt by its index where it is the task's own, and else as it is."""
    judged = [replace(each, extras={}) for each in completions]  # routed experts, say, are no scorer's matter
    if (index := prompt.metadata.get(OWN)) is not None:
        return Call(method=method, index=index, completions=judged, size=size)
    return Call(method=method, prompt=prompt, completions=judged, size=size)


def _score(judgement: Judgement) -> Score:
    if judgement.failure is not None:
        raise ScorerRaised(judgement.failure, masked=judgement.masked)
    return Score(reward=judgement.reward, parts=judgement.parts)


def _rollout(completion: Completion, judgement: Judgement) -> Rollout:
    return Rollout(
        completion=completion,
        reward=judgement.reward,
        parts=judgement.parts,
        failure=judgement.failure,
        masked=judgement.masked,
    )
