"""What is asked and how it is scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config.section import Section

TaskName = Literal["copy", "successor", "reasoning_gym", "jsonl"]


class TaskShare(Section):
    """One task of a mix, and how much of it."""

    label: str = Field("", pattern=r"^[\w.-]*$", description="name in tickets and metrics; empty: the task's name")
    name: TaskName = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    weight: float = Field(1.0, ge=0, description="share of the groups, relative to the others; 0: never asked")

    @property
    def key(self) -> str:
        return self.label or self.name


class OverlongConfig(Section):
    """The soft penalty on answers that come near the cut (DAPO, arXiv:2503.14476)."""

    buffer: int = Field(0, ge=0, description="tokens before sampling.max_new_tokens over which it grows; 0: off")
    penalty: float = Field(1.0, gt=0, description="reward that an answer loses at the cut")


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: TaskName = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    mix: tuple[TaskShare, ...] = Field((), description="several tasks with weights, instead of name and args")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="penalty on answers near the cut")

    @property
    def shares(self) -> tuple[TaskShare, ...]:
        """The tasks of the run; one of them where no mix is given."""
        return self.mix or (TaskShare(name=self.name, args=self.args),)

    @model_validator(mode="after")
    def _mix_is_clear(self) -> TaskConfig:
        keys = [share.key for share in self.mix]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"mix: {key!r} is there twice; allowed: one entry for each label")
        if self.mix and not any(share.weight for share in self.mix):
            raise ValueError("mix: every weight is 0; allowed: at least one above 0")
        return self
