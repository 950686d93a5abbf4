"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from streamrl.observe.limits import LIMITS, Limits
from streamrl.observe.stamps import Neighbours


@dataclass
class Findings:
    """What an audit found; `problems` empty means that every checked promise held."""

    first: int = 0  # step of the first batch that the journal still has
    handed_out: int | None = None  # step of a last batch that was not trained before the run was ended
    batches: int = 0
    groups: int = 0
    quarantined: int = 0  # of them: neither lost nor trained
    reused: int = 0  # of them: an earlier step had them (`replay.reuse`)
    uses: int = 0  # most of one group, as far as the journal goes back
    trained: int = 0  # tokens
    audited: int = 0  # exact tokens whose log-prob was computed again
    staleness: int = 0  # largest, in learner steps
    bound: int | None = None  # of the order; None: it has none
    differences: list[np.ndarray] = field(default_factory=list)  # |log-prob difference| of audited tokens
    inexact: int = 0  # trained tokens behind an update in place
    inexact_differences: list[np.ndarray] = field(default_factory=list)  # of those whose version's weights are kept
    rounded: list[np.ndarray] = field(default_factory=list)  # |difference| that bfloat16 makes, of some audited tokens
    limits: Limits = LIMITS["float32"]  # that the differences were held to
    before: Neighbours = field(default_factory=Neighbours)  # towards the kept versions before those of the stamps
    behind: Neighbours = field(default_factory=Neighbours)
    problems: list[str] = field(default_factory=list)
