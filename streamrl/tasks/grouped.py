"""Environments of one turn whose judge sees more than one answer: all of a group, or two against each other.

Grouped      prompt ─▶ n answers ─▶ one judge that sees them all ─▶ n rewards
Contrastive  prompt ─▶ n answers ─▶ each pair: which is better? ─▶ n shares of contests won
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from itertools import combinations

from streamrl.tasks.environment import Completion, Environment, Prompt, Rollout, Score, check_reward

# The reward of an answer that has no other to be held against.
UNOPPOSED = 0.5


class Grouped(Environment):
    """A task whose judge sees all answers of a group, and scores them against each other."""

    @abstractmethod
    async def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Score]:
        """One score for each answer, in order. May raise: the group is masked and counted."""

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        (score,) = await self.score_group(prompt, [completion])
        return score

    async def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """The judgement of those answers that were given; the others have failed already."""
        given = [completion for completion in completions if completion.finish_reason != "abort"]
        try:
            scores = list(await self.score_group(prompt, given)) if given else []
            if len(scores) != len(given):
                raise ValueError(f"{len(scores)} scores for {len(given)} answers")
            for score in scores:
                check_reward(score)
        except Exception as error:  # the policy for foreign scorers: count, log, go on
            return [self.unscored(prompt, completion, error) for completion in completions]
        following = iter(scores)
        return [
            _rollout(each, Score(reward=0.0) if each.finish_reason == "abort" else next(following))
            for each in completions
        ]


class Contrastive(Grouped):
    """A task whose judge compares two answers. Reward: the mean of what it says of an answer against each other one.

    So a group of n takes n (n - 1) / 2 judgements, all at the same time, and its rewards have the mean 1/2.
    """

    @abstractmethod
    async def preference(self, prompt: Prompt, first: Completion, second: Completion) -> float:
        """How likely `first` is the better one, 0..1; 1/2: neither. May raise: the whole group is masked."""

    async def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Raises ValueError for a preference that is none."""
        pairs = list(combinations(range(len(completions)), 2))
        asked = (self.preference(prompt, completions[one], completions[other]) for one, other in pairs)
        won = [0.0] * len(completions)
        for (one, other), preference in zip(pairs, await asyncio.gather(*asked), strict=True):
            if not 0.0 <= preference <= 1.0:
                raise ValueError(f"preference {preference} is not allowed; allowed: 0 to 1")
            won[one] += preference
            won[other] += 1.0 - preference
        contests = len(completions) - 1
        return [Score(reward=each / contests if contests else UNOPPOSED) for each in won]


def _rollout(completion: Completion, score: Score) -> Rollout:
    return Rollout(completion=completion, reward=score.reward, parts=score.parts)
