"""What a task says over HTTP, JSON both ways: a prompt, what the policy observes, what its answers are worth.

    GET  /TASK/about                                    -> About
    POST /TASK/prompt       {index, split}              -> RemotePrompt
    POST /TASK/observation  {prompt, turns}             -> Observed
    POST /TASK/score        {prompt, answers}           -> Judged      (answers: the turns of each sample)

A reward model gives `score` alone: a request for `about` may be refused, with 404, 405 or 501 for example.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from streamrl.tasks.environment import Completion, Message, Prompt, Score, check_reward
from streamrl.tasks.failures import ScorerRaised
from streamrl.tasks.host_wire import OWN

LARGEST = 64 << 20  # bytes of one request or reply


class About(msgspec.Struct, frozen=True):
    """What kind of task it is."""

    max_turns: int = 1
    lowest_reward: float = 0.0  # of an answer on which its scorer raises
    judges_groups: bool = False  # an answer alone has no score that means anything


class RemotePrompt(msgspec.Struct, frozen=True):
    """`Prompt` on the wire, without OWN both ways: the index by which one process made it means nothing elsewhere."""

    index: int
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    images: tuple[str, ...] = ()
    answer: str | None = None
    metadata: dict[str, Any] = {}

    @classmethod
    def of(cls, prompt: Prompt) -> RemotePrompt:
        return cls(prompt.index, prompt.text, prompt.messages, prompt.images, prompt.answer, _sent(prompt.metadata))

    def prompt(self) -> Prompt:
        """Raises ValueError where it has neither text nor messages, or both."""
        return Prompt(
            index=self.index,
            text=self.text,
            messages=self.messages,
            images=self.images,
            answer=self.answer,
            metadata=_sent(self.metadata),
        )


def _sent(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata without OWN."""
    return {name: value for name, value in metadata.items() if name != OWN}


class Turn(msgspec.Struct, frozen=True):
    """One turn of the policy, as text."""

    text: str
    finish_reason: str

    @classmethod
    def of(cls, completion: Completion) -> Turn:
        return cls(completion.text, completion.finish_reason)


class AskPrompt(msgspec.Struct, frozen=True):
    index: int
    split: Literal["train", "probe"]


class AskObservation(msgspec.Struct, frozen=True):
    prompt: RemotePrompt
    turns: tuple[Turn, ...]


class AskScores(msgspec.Struct, frozen=True):
    prompt: RemotePrompt
    answers: tuple[tuple[Turn, ...], ...]


class Observed(msgspec.Struct, frozen=True):
    """What the policy observes; neither of the two ends the conversation."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None


class RemoteScore(msgspec.Struct, frozen=True):
    """`Score` on the wire; `failure` where the scorer raised, `masked` where that says nothing of the answer."""

    reward: float
    parts: dict[str, float] = {}
    failure: str | None = None
    masked: bool = False

    def checked(self) -> Score:
        """Raises ScorerRaised where the scorer raised, and ValueError where it gave no finite number."""
        if self.failure is not None:
            raise ScorerRaised(self.failure, masked=self.masked)
        score = Score(reward=self.reward, parts=self.parts)
        check_reward(score)
        return score


class Judged(msgspec.Struct, frozen=True):
    """One score for each answer, in order."""

    scores: tuple[RemoteScore, ...]
