"""Section `run`: how a run is called, where it is kept, how long it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config.section import Section, rule


class RunConfig(Section):
    """What a run is called, where it is kept and how long it lasts."""

    name: str = Field("run", pattern=r"^[\w][\w.-]*$", description="name of the run folder")
    folder: Path = Field(Path("runs"), description="folder that holds the run folders")
    id: str | None = Field(
        None,
        pattern=r"^[\w][\w.-]{0,63}$",
        description="id of RUN/run.json, for a role whose host does not share the run folder; null: a random one",
    )
    seed: int = Field(1, ge=0, le=2**31 - 1, description="seed of prompts, initialisation and dropout")
    steps: int = Field(100, ge=1, description="learner steps of the whole run")
    epochs: float | None = Field(
        None, gt=0, description="times that the task's prompts are asked, instead of steps; the run's record has steps"
    )
    exit_interval: int | None = Field(
        None,
        ge=1,
        description="save and end, to be gone on with, behind each learner step that it divides; null: never",
    )
    exit_duration: float | None = Field(
        None, gt=0, description="minutes of training after which the same is done behind a step; null: never"
    )
    placement: Literal["separate", "shared"] = Field(
        "separate",
        description="shared: learner and servers take turns on the same devices: the servers sleep while it trains",
    )
    restarts: int = Field(3, ge=0, description="times that the replay service, and the learner, are started again")
    start_timeout: float = Field(300.0, gt=0, description="seconds that a role may take to be ready")
    stop_timeout: float = Field(60.0, gt=0, description="seconds that a role may take to end, then it is killed")
    silence_timeout: float = Field(
        600.0, gt=0, description="seconds that a role waits for another one that sends it nothing, then it fails"
    )
    progress_timeout: float | None = Field(
        None,
        gt=0,
        description="seconds without a learner step after which every role ends with an error; above "
        "replay.group_timeout; null: twice the longest that one step may rightly wait",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_steps_are_none(cls, values: Any) -> Any:
        """`run.steps=null` takes away what a file says, so that `run.epochs` can replace it."""
        if isinstance(values, dict) and values.get("steps", 0) is None:
            return {key: value for key, value in values.items() if key != "steps"}
        return values

    @rule
    def _length_is_given_once(self) -> None:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"epochs: {self.epochs:g} is not possible beside run.steps={self.steps}; allowed: one of the two, the "
                "other null"
            )

    @property
    def shares_devices(self) -> bool:
        """Do learner and servers take turns on the same devices?"""
        return self.placement == "shared"
