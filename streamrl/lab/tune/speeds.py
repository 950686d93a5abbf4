"""How long a learner step takes with other ranks and micro batches: measured, or by a named assumption. Pure.

    seconds(ranks, micro batch) = line of the calibration x share(ranks) x share(micro batch)

A share is measured where a run, or the learner alone on recorded batches, had that rank count or micro batch and
everything else as the calibration. A rank count between two measured ones has a share between theirs, by powers of the
ranks. Beyond them, from the nearest on, the part that grows with the tokens is divided by the ranks, and each doubling
keeps `doubling` of the tokens/s a rank. For other micro batches nothing is known: they are no choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.lab.simulate.model import Line

Kind = tuple[int, int]  # ranks, micro batch in tokens

# Share of the tokens/s of a rank that is left after each doubling of the ranks, where nobody has measured it.
DOUBLING = 0.9


@dataclass(frozen=True, slots=True)
class LearnerSpeeds:
    """A learner and its relatives.

    >>> speeds = LearnerSpeeds(Line(1.0, 0.001), own=(1, 4096), measured={(1, 8192): 0.5}, doubling=1.0)
    >>> speeds.line(1, 8192), speeds.line(2, 4096)
    (Line(fixed=0.5, each=0.0005, deviations=(1.0,)), Line(fixed=1.0, each=0.0005, deviations=(1.0,)))
    """

    own_line: Line
    own: Kind
    measured: Mapping[Kind, float] = field(default_factory=dict)  # seconds of a token, over those of the calibration
    doubling: float = DOUBLING

    @property
    def micro_batches(self) -> list[int]:
        """Those whose speed was measured."""
        return sorted({self.own[1], *(micro for ranks, micro in self.measured if ranks == self.own[0])})

    def line(self, ranks: int, micro_batch: int) -> Line:
        """Seconds of a step against its tokens."""
        if (both := self.measured.get((ranks, micro_batch))) is not None:
            return _scaled(self.own_line, both, both)
        share = 1.0 if micro_batch == self.own[1] else self.measured[self.own[0], micro_batch]
        shares = {self.own[0]: 1.0, **{each: of for (each, micro), of in self.measured.items() if micro == self.own[1]}}
        below = max((each for each in shares if each <= ranks), default=min(shares))
        above = min((each for each in shares if each >= ranks), default=max(shares))
        if below < ranks < above:
            way = math.log(ranks / below) / math.log(above / below)
            share *= shares[below] ** (1 - way) * shares[above] ** way
            return _scaled(self.own_line, share, share)
        share *= shares[below]  # the nearest one's, below or above all
        doublings = math.log2(ranks / below)
        return _scaled(self.own_line, share, share / (2 * self.doubling) ** doublings)

    def assumptions(self, kinds: set[Kind]) -> Iterator[str]:
        """What is assumed of the learners that are among the choices, a line each."""
        unmeasured = {ranks for ranks, _ in kinds} - {self.own[0]} - {ranks for ranks, _ in self.measured}
        if unmeasured:
            ranks = ", ".join(map(str, sorted(unmeasured)))
            yield (
                f"learner.ranks={ranks}: not measured; between measured ones as those, beyond them each doubling keeps "
                f"{self.doubling:.0%} of the tokens/s a rank (--doubling)"
            )
        crossed = {(r, m) for r, m in kinds if r != self.own[0] and m != self.own[1]} - set(self.measured)
        if crossed:
            yield "ranks and micro batch: their effects on the learner's speed are multiplied"


def seconds_of_a_token(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the steps for each trained token, without waits and publishes. Raises ValueError without a token."""
    tokens = sum(row["tokens/trained"] for row in rows)
    if not tokens:
        raise ValueError("no token was trained")
    return float(sum(row["time/step"] - row["time/wait"] - row["time/publish"] for row in rows) / tokens)


def _scaled(line: Line, fixed: float, each: float) -> Line:
    return replace(line, fixed=line.fixed * fixed, each=line.each * each)
