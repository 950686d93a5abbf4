"""What a critic's folder says of its model, and whether it can value this policy's answers on this layout.

Pure, as `shape.py`: a plan and the checks before a start ask it without Megatron.
"""

from __future__ import annotations

from streamrl.config import Config
from streamrl.learner.shape import ModelShape
from streamrl.learner.teacher_shape import shape_beside

KEY = "critic.model"


def critic_shape(config: Config, policy: ModelShape) -> ModelShape | None:
    """The shape of the critic, the policy's without a folder of its own; None where there is no critic.

    Raises ConfigError, a line for each mistake.
    """
    if not config.algo.advantage.has_critic:
        return None
    if config.critic.model is None:
        return policy
    return shape_beside(policy, config.critic.model, KEY, config.model.builder(None), config.learner.layout)
