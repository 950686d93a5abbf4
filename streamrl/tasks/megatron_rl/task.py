"""A user's agent as a task: its plays are the groups, and what it asks of the policy is trained.

    prompt index ─▶ the agent, random state of that index ─▶ plays ─▶ rollouts ─▶ n samples

An agent draws its own prompts. All plays of a group begin from the same random state, one after another up to their
first call of the policy, so that they ask the same prompt; the policy answers when all of them have come there. Groups
begin one after another too, and none is late for that.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import ConfigDict, Field

from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.call_clock import UntimedLock, restart_clock
from streamrl.tasks.environment import (
    Branch,
    Completion,
    Environment,
    Inference,
    Message,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.episodes import NotPlayed, begun, unbegun
from streamrl.tasks.failures import describe
from streamrl.tasks.megatron_rl.agents import Agent, GroupedRolloutRequest, GroupRolloutParams
from streamrl.tasks.megatron_rl.courses import Course, Wanted, course_of
from streamrl.tasks.megatron_rl.policy import EPISODE, PolicyInterface, Recorder
from streamrl.tasks.megatron_rl.reward_only import RewardOnlyAgent
from streamrl.tasks.megatron_rl.samples import AnyRollout, Episodes, score_of
from streamrl.tasks.order import episode_seed

Value = TypeVar("Value")


class AgentTaskArguments(TaskArguments):
    """All others are keyword arguments of the agent's class."""

    model_config = ConfigDict(extra="allow")

    evaluation_prompts: int = Field(32, ge=1, description="prompts of the agent's evaluation")
    reward_failed: float = Field(0.0, description="reward of a sample on which the agent raises")


class AgentTask(Environment):
    """What the agent asks, rewarded as it says."""

    Arguments = AgentTaskArguments
    has_turns = True
    agent_class: ClassVar[type[Agent]]

    def __init__(self, arguments: AgentTaskArguments, seed: int, split: str) -> None:
        """Raises ValueError, with one line, for an agent that cannot be made or does not fit the split."""
        self._arguments, self._seed, self._split = arguments, seed, split
        self.lowest_reward = arguments.reward_failed
        self._agent = self._made(arguments.model_extra or {})
        self._given = split == "probe" and _gives_prompts(self._agent)
        self._prompts: list[tuple[Any, Any]] | None = None  # of the evaluation
        self._course = course_of(self._agent, validation=split == "probe", given=self._given)
        if self._given:
            self._prompts = self._evaluated_at_once()
        if self._course is not None and self._course.evaluates:
            self.size = arguments.evaluation_prompts if self._prompts is None else len(self._prompts)
        self._drawing = UntimedLock()

    def prompt(self, index: int) -> Prompt:
        """What the agent asks, where that is known without waiting; else its index alone."""
        asked: Any = None
        if self._prompts is not None:
            asked = self._prompts[index % len(self._prompts)][0]
        elif not self._given and _draws_prompts(self._agent):
            with _seeded(self._seed_of(index)):
                drawn = _at_once(self._agent.get_prompt(validation=self._split == "probe"))
            asked = None if drawn is None else drawn[0]
        if asked is None:
            return Prompt(index=index, text=f"prompt {index} of {type(self._agent).__name__}")
        messages = [("user", asked)] if isinstance(asked, str) else [(each.role, each.content) for each in asked]
        return Prompt(index=index, messages=tuple(Message(role=role, content=content) for role, content in messages))

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Raises TypeError: only what the agent has played has a reward."""
        raise TypeError(f"{type(self._agent).__name__}: an answer without its episode has no reward")

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where the agent asks the policy nothing."""
        played: list[Rollout] = []
        while len(played) < n:
            more = await self._play(inference, prompt, n - len(played))
            played += more
            if self._course is None or not self._course.samples or not more:
                break
        few = NotPlayed(f"the agent gave {len(played)} rollouts, {n} were asked for")
        played += [self.unscored(prompt, unbegun(inference, prompt), few) for _ in range(n - len(played))]
        return begun(played[:n])

    async def close(self) -> None:
        if hasattr(self._agent, "close"):
            closing = self._agent.close()
            if inspect.isawaitable(closing):
                await closing

    def _made(self, given: dict[str, Any]) -> Any:
        try:
            return self.agent_class(**given)
        except Exception as error:  # whatever a constructor of the user's raises
            name = self.agent_class.__name__
            raise ValueError(
                f"{ARGUMENTS}: {name} cannot be made: {describe(error)}; allowed: arguments of its constructor"
            ) from None

    async def _play(self, inference: Inference, prompt: Prompt, count: int) -> list[Rollout]:
        """At most `count` samples, if there are so many, of plays that begin alike."""
        wanted = await self._wanted(prompt.index, count)
        course = self._course
        if course is None:
            return await self._episodes(inference, prompt, wanted)
        gate = asyncio.Event()
        plays = 1 if not course.samples else -(-count // course.samples)
        recorders = [[Recorder(inference, gate) for _ in range(course.players)] for _ in range(plays)]
        running = [functools.partial(self._called, course, each, wanted) for each in recorders]
        found = await self._alike(running, recorders, gate, self._seed_of(prompt.index))
        return [
            rollout
            for each, given in zip(recorders, found, strict=True)
            for rollout in self._samples(inference, prompt, Episodes(each), given)
        ]

    async def _called(self, course: Course, recorders: Sequence[Recorder], wanted: Wanted) -> list[AnyRollout]:
        return await course.play(self._agent, [PolicyInterface(each) for each in recorders], wanted)

    async def _alike(
        self,
        plays: Sequence[Callable[[], Coroutine[Any, Any, list[AnyRollout]]]],
        recorders: Sequence[Sequence[Recorder]],
        gate: asyncio.Event,
        seed: int,
    ) -> list[list[AnyRollout] | BaseException]:
        """What each play gives, or raises."""
        running: list[asyncio.Task[list[AnyRollout]]] = []
        try:
            async with self._drawing:
                for play, of_play in zip(plays, recorders, strict=True):
                    restart_clock()  # the plays before it have come to the policy
                    seed_all(seed)
                    running.append(asyncio.create_task(play()))
                    reached = [asyncio.create_task(each.reached.wait()) for each in of_play]
                    try:
                        await asyncio.wait((running[-1], *reached), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for each in reached:
                            each.cancel()
            gate.set()
            return list(await asyncio.gather(*running, return_exceptions=True))
        finally:
            for task in running:
                task.cancel()

    async def _episodes(self, inference: Inference, prompt: Prompt, wanted: Wanted) -> list[Rollout]:
        """The episodes of a group that the agent prepares."""
        request = GroupedRolloutRequest(
            num_groups=1,
            rollouts_per_group=wanted.count,
            inference_interface=PolicyInterface(Recorder(inference)),
            validation=wanted.validation,
        )
        async with self._drawing:
            seed_all(self._seed_of(prompt.index))
            params = await self._agent.prepare_group_rollout(request)
        recorders = [Recorder(inference) for _ in range(wanted.count)]
        found = await asyncio.gather(*(_within(each, _episode(params)) for each in recorders), return_exceptions=True)
        return [
            rollout
            for recorder, given in zip(recorders, found, strict=True)
            for rollout in self._samples(inference, prompt, Episodes([recorder]), given)
        ]

    def _samples(
        self, inference: Inference, prompt: Prompt, episodes: Episodes, given: list[AnyRollout] | BaseException
    ) -> Iterator[Rollout]:
        """The samples of one play. Raises what the policy raised, and what ends the process."""
        episodes.check()
        if isinstance(given, BaseException):
            if not isinstance(given, Exception):
                raise given
            yield self.unscored(prompt, episodes.unnamed() or unbegun(inference, prompt), given)
            return
        named = [_named(episodes, rollout) for rollout in given]  # all of them, before others take what is left
        for rollout, found in zip(given, named, strict=True):
            own = () if isinstance(found, Exception) else found
            branches = tuple(Branch(completion=each) for each in own[:-1])
            try:
                score = score_of(rollout)
                check_reward(score)
                if isinstance(found, Exception):
                    raise found
            except Exception as error:  # the policy for foreign environments: count, log, go on
                left = own[-1] if own else episodes.unnamed()
                yield self.unscored(prompt, left or unbegun(inference, prompt), error, branches)
                continue
            yield Rollout(completion=own[-1], reward=score.reward, parts=score.parts, branches=branches)

    async def _wanted(self, index: int, count: int) -> Wanted:
        if self._given and self._prompts is None:
            self._prompts = list(await self._evaluation_prompts())
        return Wanted(
            index=index,
            count=count,
            validation=self._split == "probe",
            prompts=self._arguments.evaluation_prompts,
            prompt=None if self._prompts is None else self._prompts[index % len(self._prompts)],
        )

    def _evaluated_at_once(self) -> list[tuple[Any, Any]] | None:
        try:
            with _seeded(self._seed):
                found = _at_once(self._evaluation_prompts())
        except Exception as error:  # whatever the agent raises
            key, count = f"{ARGUMENTS}.evaluation_prompts", self._arguments.evaluation_prompts
            raise ValueError(f"{key}: {count}: {describe(error)}; allowed: as many as the agent has") from None
        if found is not None and not found:
            raise ValueError(
                f"task.name: {type(self._agent).__name__} has no evaluation_prompts; allowed: at least one"
            )
        return None if found is None else list(found)[: self._arguments.evaluation_prompts]

    def _evaluation_prompts(self) -> Coroutine[Any, Any, Any]:
        prompts: Coroutine[Any, Any, Any] = self._agent.evaluation_prompts(
            num_prompts=self._arguments.evaluation_prompts, validation=True
        )
        return prompts

    def _seed_of(self, index: int) -> int:
        return episode_seed(self._seed, self._split, index)


@functools.cache
def task_of(agent: type[Agent]) -> type[Environment]:
    """The task of an agent's class."""
    return type(agent.__name__, (AgentTask,), {"agent_class": agent, "__doc__": agent.__doc__})


def _gives_prompts(agent: Any) -> bool:
    """Whether its evaluation gives its prompts beforehand."""
    return isinstance(agent, RewardOnlyAgent) and (
        type(agent).evaluation_prompts is not RewardOnlyAgent.evaluation_prompts
    )


def _draws_prompts(agent: Any) -> bool:
    """Whether `get_prompt` is what its groups are asked."""
    kind, base = type(agent), RewardOnlyAgent
    return isinstance(agent, base) and kind.prepare_group_rollout is base.prepare_group_rollout


def _named(episodes: Episodes, rollout: AnyRollout) -> tuple[Completion, ...] | NotPlayed:
    """The conversations of a rollout, or why there are none."""
    try:
        return episodes.completions(rollout)
    except NotPlayed as error:
        return error


async def _episode(params: GroupRolloutParams) -> list[AnyRollout]:
    return [await params.build_rollout(await params.run_episode())]


def _within(recorder: Recorder, work: Coroutine[Any, Any, Value]) -> Awaitable[Value]:
    """A task whose calls of the policy are one episode's."""
    context = contextvars.copy_context()
    context.run(EPISODE.set, recorder)
    return asyncio.get_running_loop().create_task(work, context=context)


def _at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives that waits for nothing; None for one that does."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    return None


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The random state of a prompt, and behind it what was there before."""
    before, numpy_before = random.getstate(), np.random.get_state()
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
