"""The task `gymnasium`: an environment of text observations and actions, in the library's own virtual environment."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from streamrl.tasks.played import Played, PlayedArguments

MOST_EPISODES = 256  # of one adapter at once: threads that wait for the policy


class GymnasiumArguments(PlayedArguments):
    """Arguments of `gymnasium`."""

    max_turns: int = Field(16, ge=1, description="steps of an episode")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    system: str | None = Field(None, description="what comes before the first observation; null: nothing")


class Gymnasium(Played):
    """Reward: the sum of the steps' rewards. Numbers of the last step's `info` are reward parts."""

    Arguments = GymnasiumArguments
    library = "gymnasium"

    @classmethod
    def settings(cls, arguments: GymnasiumArguments) -> dict[str, Any]:
        return {**arguments.model_dump(include={"max_turns", "chat", "system"}), "parallel": MOST_EPISODES}
