"""The reward of an answer as the weighted sum of several (`task.rewards`).

task's own score ─┐
reward model     ─┼─▶ sum of weight x score ─▶ reward        each score is a part of the reward, by its name
one of your own  ─┘
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamrl.config import Config
from streamrl.tasks.environment import Environment, Prompt, Rollout
from streamrl.tasks.parsing import Parsers
from streamrl.tasks.rewards.base import Judge, Reward

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weighted:
    """The rewards of a run. Example: `Weighted.of(config, judge)`; without `task.rewards` nothing changes."""

    parts: tuple[tuple[str, float, Reward], ...] = ()  # name, weight, what scores
    judge: Judge | None = None
    parsers: Parsers = field(default_factory=Parsers)

    @classmethod
    def of(cls, config: Config, judge: Judge | None = None) -> Weighted:
        parts = []
        for share in config.task.rewards:
            kind = share.chosen("name")
            parts.append((share.key, share.weight, kind(kind.Options.model_validate(share.name_options))))
        return cls(tuple(parts), judge, Parsers.of(config.task))

    async def judged(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with their rewards; those that were not given or not judged stay as they are.

        A rollout on which the task's scorer raised has the lowest reward of the task as that part. Raises what a
        reward raises.
        """
        found = list(rollouts)
        places = [place for place, each in enumerate(found) if not each.masked and each.is_answered]
        if not self.parts or not places:
            return found
        asked = [found[place] for place in places]
        answers = [self.parsers.thought(rollout.completion)[1] for rollout in asked]
        given = (part.scores(prompt, asked, answers, self.judge) for _, _, part in self.parts)
        scores = await asyncio.gather(*given)
        for number, (place, rollout) in enumerate(zip(places, asked, strict=True)):
            found[place] = self._sum(prompt, rollout, [of_part[number] for of_part in scores])
        return found

    def _sum(self, prompt: Prompt, rollout: Rollout, scores: Sequence[float | str]) -> Rollout:
        parts: dict[str, float] = dict(rollout.parts)
        reward = 0.0
        for (name, weight, _), score in zip(self.parts, scores, strict=True):
            if isinstance(score, str) or not math.isfinite(score):
                reason = f"{name}: {score if isinstance(score, str) else f'a score of {score}'}"
                log.warning("prompt %d: %.80r has no reward: %s", prompt.index, rollout.completion.text, reason)
                return replace(rollout, reward=0.0, failure=reason, masked=True)
            reward += weight * score
            parts[f"rewards.{name}"] = float(score)
        return replace(rollout, reward=reward, parts=parts)


def check_turns(config: Config, tasks: Mapping[str, Environment]) -> None:
    """Raise ValueError for a task of several turns whose answers a reward model would judge."""
    if not any(each.chosen("name").asks_model for each in config.task.rewards):
        return
    for name, task in tasks.items():
        if task.has_turns:
            raise ValueError(
                f"task.rewards: a reward model judges one answer to one prompt, and {name} has several turns; allowed: "
                "the task's own reward, or a task of one turn"
            )
