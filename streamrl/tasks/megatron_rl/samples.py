"""From the rollouts that an agent gives back to samples: which conversation each was, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamrl.tasks.environment import EXACT, Completion, Score
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerRaised
from streamrl.tasks.megatron_rl.policy import Asked, Recorder
from streamrl.tasks.megatron_rl.rollouts import MASKED, Rollout, TokenRollout
from streamrl.tasks.turns import TURNS

AnyRollout = Rollout | TokenRollout


class Episodes:
    """The conversations of one call of an agent; each becomes at most one sample, or one branch of a rollout."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders
        self._taken: list[Asked] = []

    def check(self) -> None:
        """Raise what the policy raised: that is the worker's matter, and no sample's."""
        for recorder in self._recorders:
            if recorder.lost is not None:
                raise recorder.lost

    def completions(self, rollout: AnyRollout) -> tuple[Completion, ...]:
        """The conversations of a rollout, which are no other one's; that of its last turn is the last.

        Several where its turns, of token ids, do not extend one another. Raises NotPlayed.
        """
        found = [] if rollout.is_placeholder else [asked for asked in self._free() if _is_of(asked, rollout)]
        whole = [asked for asked in found if len(asked.replies) == len(rollout.trajectory)]
        if not found:
            raise NotPlayed("a rollout names no answer of the policy; allowed: its ids, token_ids, or texts")
        if isinstance(rollout, TokenRollout) and len(rollout.trajectory) > 1 and not whole:
            taken = self._of_turns(rollout)
        else:
            taken = [(whole or found)[0]]
        self._taken += taken
        return tuple(asked.conversation.completion for asked in taken)

    def _of_turns(self, rollout: TokenRollout) -> list[Asked]:
        """The conversations of all turns, in the order of their last ones. Raises NotPlayed."""
        taken: list[Asked] = []
        for place in range(len(rollout.trajectory)):
            asked = next((each for each in self._free() if _has_turn(each, rollout, place)), None)
            if asked is None:
                raise NotPlayed("a turn of a rollout is no answer of the policy; allowed: its ids, or token_ids")
            taken = [*(each for each in taken if each is not asked), asked]
        return taken

    def unnamed(self) -> Completion | None:
        """A conversation that no rollout has named; None where there is none."""
        asked = next(self._free(), None)
        if asked is None:
            return None
        self._taken.append(asked)
        return asked.conversation.completion

    def _free(self) -> Iterator[Asked]:
        return (each for recorder in self._recorders for each in recorder.asked if each not in self._taken)


def score_of(rollout: AnyRollout) -> Score:
    """The reward, that of all turns added up; a reward of 1 is a wholly right answer.

    Raises NotPlayed for a placeholder and for no reward, ScorerRaised for a rollout that its agent masks.
    """
    if rollout.rollout_status == MASKED:
        raise ScorerRaised(rollout.failure_reason or "masked by its agent", masked=True)
    if rollout.is_placeholder:
        raise NotPlayed(rollout.failure_reason or "the agent gave a placeholder")
    if rollout.reward is None:
        raise NotPlayed("the agent gave no reward")
    turns = [float(each) for each in rollout.reward] if isinstance(rollout.reward, list) else []
    reward = sum(turns) if turns else float(rollout.reward) if not isinstance(rollout.reward, list) else 0.0
    parts = {f"turn_{place}": each for place, each in enumerate(turns, 1)}
    return Score(reward=reward, parts={EXACT: float(reward == 1.0), TURNS: float(len(rollout.trajectory)), **parts})


def _is_of(asked: Asked, rollout: AnyRollout) -> bool:
    """Whether the rollout's last turn is an answer of this conversation."""
    if not isinstance(rollout, TokenRollout):
        return rollout.trajectory[-1] in asked.texts()
    if rollout.completion_ids and rollout.completion_ids[-1]:
        return rollout.completion_ids[-1] in asked.completion_ids
    return rollout.trajectory[-1] in asked.token_ids()


def _has_turn(asked: Asked, rollout: TokenRollout, place: int) -> bool:
    """Whether a turn of the rollout is an answer of this conversation."""
    if place < len(rollout.completion_ids) and rollout.completion_ids[place]:
        return rollout.completion_ids[place] in asked.completion_ids
    return rollout.trajectory[place] in asked.token_ids()
