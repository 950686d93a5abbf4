"""What is measured of the policy while it trains, and by `streamrl eval`, and how."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from streamrl.choices import ENGINES
from streamrl.config.generate import LEAST_TEMPERATURE, SamplingConfig
from streamrl.config.section import Section, rule
from streamrl.config.task import TaskConfig, TaskShare

# Seconds after the deadline in which a task scores what came in time; then its answers are left out.
SCORING_TIME = 10.0

HELD_OUT = 64  # prompts of a held-out split that are asked unless evaluate.prompts says another number


class EvaluateConfig(Section):
    """Held-out prompts, how often each is answered, and when."""

    every: int = Field(0, ge=0, description="learner steps between two evaluations of a run; 0: none in the run")
    worker: int = Field(0, ge=0, description="generator worker on one server of which a run's evaluations take place")
    tasks: tuple[TaskShare, ...] = Field((), description="what is evaluated; empty: every task of the run")
    engine: Annotated[str, ENGINES] = Field(
        "sglang", description="what answers `streamrl eval`; a run's own evaluations: its servers alone"
    )
    engine_options: dict[str, Any] = Field(default_factory=dict, description="options of the engine")
    prompts: int | None = Field(
        None,
        ge=1,
        description=f"prompts of each task at most; null: {HELD_OUT} of a held-out split, all of evaluation_only tasks",
    )
    samples: int = Field(8, ge=1, description="n, answers to each prompt, at the sampling temperature")
    k: tuple[int, ...] = Field((), description="k of the pass@k that are reported; empty: 1, 2, 4, ... up to samples")
    greedy: bool = Field(True, description="one more answer to each prompt, at temperature 0")
    temperature: float | None = Field(None, ge=LEAST_TEMPERATURE, description="null: that of generate.sampling")
    top_p: float | None = Field(None, gt=0, le=1, description="null: that of generate.sampling")
    top_k: int | None = Field(None, ge=-1, description="from 1 on, -1: all tokens; null: that of generate.sampling")
    min_p: float | None = Field(None, ge=0, lt=1, description="null: that of generate.sampling")
    max_new_tokens: int | None = Field(None, ge=1, description="null: that of generate.sampling")
    in_flight: int = Field(16, ge=1, description="prompts that are answered at once")
    timeout: float = Field(240.0, gt=0, description="seconds of an evaluation; what is not answered then is left out")

    @property
    def longest(self) -> float:
        """Seconds that a version of a run may have to wait for an evaluation; 0 where none takes place."""
        return self.timeout + SCORING_TIME if self.every else 0.0

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of every pass@k, ascending; 1 is always among them."""
        powers = (1 << power for power in range(self.samples.bit_length()))
        return tuple(sorted({1, *(self.k or powers)}))

    def sampling(self, run: SamplingConfig) -> SamplingConfig:
        """How evaluated answers are drawn, where those of the run are drawn as `run` says."""
        own = {name: getattr(self, name) for name in type(run).model_fields}
        return run.model_copy(update={name: value for name, value in own.items() if value is not None})

    def shares(self, task: TaskConfig) -> tuple[TaskShare, ...]:
        """What is evaluated in a run of `task`. A weight says how often a task is trained and means nothing here."""
        return self.tasks or (*task.shares, *task.evaluated)

    def count(self, share: TaskShare, size: int | None) -> int:
        """How many prompts of a task are asked whose split has `size`; None: as many as one likes."""
        wanted = self.prompts or (size if share.evaluation_only else None) or HELD_OUT
        return wanted if size is None else min(wanted, size)

    @rule
    def _every_k_can_be_estimated(self) -> None:
        for k in self.k:
            if not 1 <= k <= self.samples:
                raise ValueError(f"k: {k} needs as many answers, samples={self.samples}; allowed: 1 to {self.samples}")

    @rule
    def _draws_from_some(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k: 0 is not allowed; allowed: -1, 1 and above, null")

    @rule
    def _a_run_measures_its_own_weights(self) -> None:
        if self.every and not self.chosen("engine").trains:
            able = [name for name in ENGINES.names if ENGINES.load(name).trains]
            raise ValueError(
                f"engine: {self.engine} has no version of the run, whose evaluations (every={self.every}) measure its "
                f"versions; allowed: {', '.join(able)}, or every=0 and `streamrl eval`"
            )

    @rule
    def _labels_differ(self) -> None:
        keys = [share.key for share in self.tasks]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"tasks: {key!r} is there twice; allowed: one entry for each label")
