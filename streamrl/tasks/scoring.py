"""How often the scorers of a worker fail, and when that ends the run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from streamrl.config.task import ScoringConfig
from streamrl.progress import RunFailedError
from streamrl.tasks.environment import Rollout

MOST_KINDS = 100  # of failures that are distinguished


class ScorerBroken(RunFailedError):
    """A scorer that has failed too often; its text ends with the user's own exception and line."""


class Scoring:
    """Counts the answers whose scorer failed, by task.

    >>> scoring = Scoring(ScoringConfig(window=4, most_failed=0.5))
    >>> scoring.count("sums", [None, None, "KeyError: 'x' (rewards.py:3)"])
    """

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._seen: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=config.window))
        self._known: set[str] = set()  # places in the user's code, or texts, of failures

    def new(self, failures: Iterable[str]) -> list[str]:
        """Those of a kind that was not seen before: their place in the user's code is another."""
        found = []
        for failure in failures:
            kind = failure[failure.rfind("(") :] if failure.endswith(")") else failure
            if kind not in self._known and len(self._known) < MOST_KINDS:
                self._known.add(kind)
                found.append(failure)
        return found

    def count(self, task: str, judgements: Sequence[str | None]) -> None:
        """`judgements`: of each answer why it was not judged, None for a judged one.

        Raises ScorerBroken when `most_failed` of the task's last `window` answers were not judged.
        """
        seen = self._seen[task]
        seen.extend(failure is not None for failure in judgements)
        failed, last = sum(seen), next((each for each in reversed(judgements) if each is not None), None)
        if last is not None and len(seen) == seen.maxlen and failed >= self._config.most_failed * len(seen):
            raise ScorerBroken(
                f"the scorer of {task} failed on {failed} of its last {len(seen)} answers "
                f"(task.scoring.most_failed={self._config.most_failed:g}): {last}"
            )


def judgements(rollouts: Sequence[Rollout]) -> list[str | None]:
    """For each answer that was to be judged why it was not; None for a judged one."""
    return [rollout.failure for rollout in rollouts if rollout.is_answered]


def says_nothing(rollouts: Sequence[Rollout]) -> bool:
    """Whether the scorer failed on every answer of a group: then it is the scorer that is broken, not an answer."""
    failures = judgements(rollouts)
    return len(failures) > 1 and all(failure is not None for failure in failures)
