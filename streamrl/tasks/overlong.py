"""The soft penalty on answers that come near the cut, as a part of the reward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from streamrl.config import Config
from streamrl.config.task import OverlongConfig
from streamrl.tasks.environment import Completion, Rollout

# The reward part of the penalty, from -penalty to 0; absent where the penalty is off.
OVERLONG = "overlong"


@dataclass(frozen=True, slots=True)
class Overlong:
    """The penalty of a run. Source: DAPO (arXiv:2503.14476), soft overlong punishment.

    >>> Overlong(OverlongConfig(buffer=10), longest=20).penalty(15)
    -0.5
    """

    config: OverlongConfig
    longest: int  # tokens after which a turn is cut

    @classmethod
    def of(cls, config: Config) -> Overlong:
        return cls(config.task.overlong, config.generate.sampling.max_new_tokens)

    def penalty(self, tokens: int) -> float:
        """What an answer whose longest turn has so many tokens gets added to its reward, <= 0.

        0 up to `longest - buffer` tokens, then down in a straight line to -penalty at `longest` and beyond.
        """
        if not self.config.buffer:
            return 0.0
        over = max(tokens - (self.longest - self.config.buffer), 0)
        return 0.0 - self.config.penalty * min(over / self.config.buffer, 1.0)

    def penalised(self, rollout: Rollout) -> Rollout:
        """The rollout with the penalty of its longest turn, in whichever branch, in its reward and its parts.

        The same one where it is off. A branch with a reward of its own keeps that.
        """
        if not self.config.buffer:
            return rollout
        penalty = self.penalty(max(map(longest_turn, rollout.completions)))
        return replace(rollout, reward=rollout.reward + penalty, parts={**rollout.parts, OVERLONG: penalty})


def longest_turn(completion: Completion) -> int:
    """The most tokens that the policy wrote in a row: all of an answer, or those of one turn of a conversation."""
    if completion.loss_mask is None:
        return len(completion.output_ids)
    others = np.flatnonzero(~completion.loss_mask)
    return int(np.diff(others, prepend=-1, append=len(completion.loss_mask)).max()) - 1
