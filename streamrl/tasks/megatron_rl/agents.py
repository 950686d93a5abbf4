"""The kinds of agents: what each is asked, and what it must give. A class of one is a task, by its path.

RolloutGenerator, TokenizedRolloutGenerator   get_reward_rollouts        rollouts, each of a prompt of its own
GroupedRolloutGenerator                       prepare_group_rollout      rollouts of one prompt
ContrastiveRolloutGenerator                   get_contrastive_rollouts   pairs: chosen, rejected
EvaluationAgent                               run_evaluation             results, never trained
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from streamrl.tasks.environment import Environment
from streamrl.tasks.megatron_rl.inference import (
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    LLMChatMessage,
    Request,
)
from streamrl.tasks.megatron_rl.rollouts import (
    AgentBaseModel,
    ContrastiveRollout,
    EvaluationResponse,
    Rollout,
    RolloutGroup,
    TokenRollout,
)

SubmissionGranularity = Literal["R", "G", "B"]
ConsumptionGranularity = Literal["G", "B"]


class RolloutRequest(Request):
    """So many rollouts."""

    num_rollouts: int
    inference_interface: InferenceInterface
    validation: bool = False


class GroupedRolloutRequest(Request):
    """So many groups of rollouts."""

    num_groups: int
    rollouts_per_group: int
    inference_interface: InferenceInterface
    validation: bool = False
    filter_groups_with_same_reward: bool = False
    submission_granularity: SubmissionGranularity = "B"
    consumption_granularity: ConsumptionGranularity = "B"


class Head2HeadRolloutRequest(Request):
    """So many games between the players behind several interfaces."""

    num_rollouts: int
    inference_interface: list[InferenceInterface]
    validation: bool = False


class EvaluationRequest(Request):
    """An evaluation of so many prompts, or of the part of one rank."""

    inference_interface: InferenceInterface
    num_prompts: int
    rank_info: tuple[int, int] | None = None  # (rank, number of ranks); None: all prompts
    validation: bool = True


class EpisodeResult(NamedTuple):
    """The answers of an episode, and the conversation with the last one."""

    responses: list[InferenceResponse]
    conversation: list[LLMChatMessage]


class GroupRolloutParams(NamedTuple):
    """What makes the rollouts of one group: `run_episode` once for each, and `build_rollout` of what that gives."""

    run_episode: Callable[[], Awaitable[EpisodeResult]]
    build_rollout: Callable[[EpisodeResult], Awaitable[Rollout | TokenRollout]]


class EnvAllocation(NamedTuple):
    """One environment's part of a batch."""

    agent: GroupedRolloutGenerator
    env_id: str
    num_groups: int


class Agent(ABC, AgentBaseModel):
    """What all agents are."""

    async def get_rollout_response(
        self,
        request: RolloutRequest | GroupedRolloutRequest | EvaluationRequest,
        inference_request: InferenceRequest,
    ) -> InferenceResponse:
        """One answer of the policy, where an agent does not ask for it itself."""
        return await request.inference_interface.agenerate(inference_request)

    @classmethod
    def as_choice(cls) -> type[Environment]:
        """The task that a configuration means by the path of this class."""
        from streamrl.tasks.megatron_rl.task import task_of

        return task_of(cls)


class RolloutGenerator(Agent, ABC):
    """Gives rollouts, each of a prompt of its own."""

    @abstractmethod
    async def get_reward_rollouts(self, request: RolloutRequest) -> list[Rollout]: ...


class ContrastiveRolloutGenerator(Agent, ABC):
    """Gives pairs of trajectories."""

    @abstractmethod
    async def get_contrastive_rollouts(self, request: RolloutRequest) -> list[ContrastiveRollout]: ...


class TokenizedRolloutGenerator(Agent, ABC):
    """Gives rollouts of token ids."""

    @abstractmethod
    async def get_reward_rollouts(self, request: RolloutRequest) -> list[TokenRollout]: ...


class GroupedRolloutGenerator(Agent, ABC):
    """Gives the rollouts of one prompt."""

    @abstractmethod
    async def prepare_group_rollout(self, request: GroupedRolloutRequest) -> GroupRolloutParams:
        """What makes the rollouts of one group, with the group's prompt in it."""

    def rollout_allocations(self, num_groups: int) -> list[EnvAllocation]:
        """The parts of a batch: all of it is this environment's."""
        name = getattr(self, "env_id", None) or "rollout"
        return [EnvAllocation(agent=self, env_id=name, num_groups=num_groups)]

    def take_restored_group(self, env_id: str) -> RolloutGroup | None:
        """None: groups of before a crash are the replay service's matter."""
        return None


class EvaluationAgent(Agent, ABC):
    """Gives the results of an evaluation."""

    @abstractmethod
    async def run_evaluation(self, request: EvaluationRequest) -> EvaluationResponse[Any]: ...
