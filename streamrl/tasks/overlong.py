"""The soft penalty on answers that come near the cut, as a part of the reward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamrl.config import Config
from streamrl.config.task import OverlongConfig
from streamrl.tasks.environment import Rollout

# The reward part of the penalty, from -penalty to 0; absent where the penalty is off.
OVERLONG = "overlong"


@dataclass(frozen=True, slots=True)
class Overlong:
    """The penalty of a run. Source: DAPO (arXiv:2503.14476), soft overlong punishment.

    >>> Overlong(OverlongConfig(buffer=10), longest=20).penalty(15)
    -0.5
    """

    config: OverlongConfig
    longest: int  # tokens after which an answer is cut

    @classmethod
    def of(cls, config: Config) -> Overlong:
        return cls(config.task.overlong, config.generate.sampling.max_new_tokens)

    def penalty(self, tokens: int) -> float:
        """What an answer of so many output tokens gets added to its reward, <= 0.

        0 up to `longest - buffer` tokens, then down in a straight line to -penalty at `longest` and beyond.
        """
        if not self.config.buffer:
            return 0.0
        over = max(tokens - (self.longest - self.config.buffer), 0)
        return 0.0 - self.config.penalty * min(over / self.config.buffer, 1.0)

    def penalised(self, rollout: Rollout) -> Rollout:
        """The rollout with the penalty of its longest branch in its reward and its parts; the same one where it is off.

        A branch with a reward of its own keeps that.
        """
        if not self.config.buffer:
            return rollout
        penalty = self.penalty(max(len(each.output_ids) for each in rollout.completions))
        return replace(rollout, reward=rollout.reward + penalty, parts={**rollout.parts, OVERLONG: penalty})
