"""What an agent gives back: rollouts with rewards, pairs of trajectories, results of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from streamrl.tasks.megatron_rl.inference import LLMChatMessage, TypeLookupable

MASKED = "masked"  # the status of a rollout that is not to be trained

KNOWN_ROLLOUT_STATUSES = ("ok", "placeholder", MASKED, "graded")


class AgentBaseModel(BaseModel, extra="allow"):
    """A model that keeps whatever else it is given."""


class Rollout(AgentBaseModel):
    """One episode as text, an entry for each turn."""

    trajectory: list[str]
    prompt_length: list[int] | None = None
    reward: float | None = None
    env_id: str = ""
    problem_id: str | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None

    @property
    def is_placeholder(self) -> bool:
        """Whether the episode has failed: it has no turn."""
        return not self.trajectory


class TokenRollout(AgentBaseModel):
    """One episode as token ids, an entry for each turn: the conversation before it and the answer."""

    trajectory: list[list[int]]
    reward: list[float] | float  # of the whole, or of each turn
    generation_mask: list[list[bool]] | None = None
    logprobs: list[list[float]] | None = None
    env_id: str = ""
    problem_id: str | None = None
    completion_ids: list[str] = []
    generation_cap: int | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None

    @property
    def is_placeholder(self) -> bool:
        """Whether the episode has failed: it has no turn."""
        return not self.trajectory


Rollouts = list[TokenRollout | Rollout]


class RolloutGroup(AgentBaseModel):
    """The episodes of one prompt."""

    rollouts: Rollouts
    batch_id: int = 0
    index_in_batch: int = 0
    uid: str | None = None

    def __iter__(self) -> Iterator[TokenRollout | Rollout]:  # type: ignore[override]
        return iter(self.rollouts)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, idx: int) -> TokenRollout | Rollout:
        return self.rollouts[idx]


GroupedRollouts = list[RolloutGroup]


class ContrastiveRollout(AgentBaseModel):
    """Two episodes of one prompt as text, of which the first is the better one."""

    chosen_trajectory: list[str]
    rejected_trajectory: list[str]


class EvaluationResult(AgentBaseModel):
    """One answer of an evaluation."""

    prompt: str | list[LLMChatMessage]
    response: Any  # str | LLMChatMessage, or a list of them


class RewardEvaluationResult(EvaluationResult):
    """One answer and its reward."""

    reward: Any  # float, or a list of them
    problem_id: str | None = None


class PassAtEvaluationResult(RewardEvaluationResult):
    """Several answers to one prompt, and a greedy one."""

    pass_at: dict[int, float]
    response: list[str | LLMChatMessage]
    reward: list[float]
    greedy_response: str | LLMChatMessage
    greedy_reward: float


Result = TypeVar("Result", bound=EvaluationResult)


class EvaluationResponse(AgentBaseModel, TypeLookupable, Generic[Result]):
    """The results of an evaluation."""

    env_id: str | None = None
    results: list[Result]

    def metrics(self) -> dict[str, list[float]]:
        """Values by the name of the metric, one for each result."""
        raise NotImplementedError(f"{type(self).__name__} has no metrics")


@EvaluationResponse.register_subclass
class RewardOnlyEvaluationResponse(EvaluationResponse[RewardEvaluationResult]):
    """One reward for each prompt."""

    type_name: str = "RewardOnlyEvaluationResponse"

    def metrics(self) -> dict[str, list[float]]:
        return {"reward": [result.reward for result in self.results]}


@EvaluationResponse.register_subclass
class PassAtEvaluationResponse(EvaluationResponse[PassAtEvaluationResult]):
    """pass@k and a greedy reward for each prompt."""

    type_name: str = "PassAtEvaluationResponse"

    def metrics(self) -> dict[str, list[float]]:
        if not self.results:
            return {}
        passed = {f"pass_at_{k}": [each.pass_at[k] for each in self.results] for k in self.results[0].pass_at}
        return {**passed, "greedy_reward": [each.greedy_reward for each in self.results]}
