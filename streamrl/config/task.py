"""What is asked and how it is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamrl.choices import REASONING_PARSERS, REWARDS, TASKS, TOOL_PARSERS
from streamrl.config.section import Section, rule
from streamrl.config.task_file import read_entries

# Variables that a chat template always has.
OF_TEMPLATES = frozenset({"messages", "tools", "add_generation_prompt"})


class TaskShare(Section):
    """One task of a mix, and how much of it."""

    label: str = Field("", pattern=r"^[\w.-]*$", description="name in tickets and metrics; empty: the task's name")
    name: Annotated[str, TASKS] = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    weight: float = Field(1.0, ge=0, description="share of the groups, relative to the others; 0: never asked")
    evaluation_only: bool = Field(False, description="never trained, only evaluated")

    @property
    def key(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class RewardShare(Section):
    """One part of the reward, and its weight."""

    label: str = Field("", pattern=r"^[\w.-]*$", description="name in metrics; empty: that of the reward")
    name: Annotated[str, REWARDS] = Field("of_task", description="which reward")
    name_options: dict[str, Any] = Field(default_factory=dict, description="options of a reward of your own")
    weight: float = Field(1.0, description="what its score is multiplied by in the sum")

    @property
    def key(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class OverlongConfig(Section):
    """The soft penalty on answers that come near the cut (DAPO, arXiv:2503.14476)."""

    buffer: int = Field(0, ge=0, description="tokens before sampling.max_new_tokens over which it grows; 0: off")
    penalty: float = Field(1.0, gt=0, description="reward that an answer loses at the cut")


class ScoringConfig(Section):
    """Where a task of the user's runs, for how long, and how often its scorer may fail."""

    processes: int = Field(2, ge=1, description="processes in which a worker runs each task of yours")
    timeout: float = Field(
        30.0,
        gt=0,
        description="seconds that one call of a task of yours may take, without those that it waits for the policy; "
        "a process that is blocked for longer is ended and replaced",
    )
    start_timeout: float = Field(120.0, gt=0, description="seconds that such a process may take to be ready")

    window: int = Field(64, ge=1, description="answers of a task, in one worker, over which failed scorers are counted")
    most_failed: float = Field(
        1.0,
        gt=0,
        description="share of them whose scorer failed at which the run ends; above 1: never",
    )


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: Annotated[str, TASKS] = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    mix: tuple[TaskShare, ...] = Field((), description="several tasks with weights, instead of name and args")
    file: Path | None = Field(
        None, description="YAML list of agent_type, agent_args, weight, evaluation_only; read into mix"
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="prompts with more tokens are too long; null: those that the context has beside an answer of "
        "sampling.max_new_tokens",
    )
    long_prompts: Literal["leave_out", "refuse", "cut_left", "cut_right", "cut_middle"] = Field(
        "leave_out",
        description="what becomes of prompts that are too long: left out, the run refused, or cut to that many tokens",
    )
    max_image_bytes: int = Field(
        16 << 20, ge=1, description="bytes that the encoded images of one prompt may have, which travel with its group"
    )
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="penalty on answers near the cut")
    rewards: tuple[RewardShare, ...] = Field(
        (), description="parts of the reward with their weights, added up; empty: the task's own alone"
    )
    tool_parser: Annotated[str | None, TOOL_PARSERS] = Field(
        None,
        description="form of the model's own tool calls, for the task tools and the agents' endpoint; null: "
        "<tool_call>{json}</tool_call>",
    )
    tool_parser_options: dict[str, Any] = Field(default_factory=dict, description="options of a parser of your own")
    reasoning_parser: Annotated[str | None, REASONING_PARSERS] = Field(
        None,
        description="form of the model's reasoning, which is then no part of its calls, of what agents get as content, "
        "and of what a reward model judges; null: none",
    )
    reasoning_parser_options: dict[str, Any] = Field(
        default_factory=dict, description="options of a parser of your own"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="further variables of the model's chat template, such as enable_thinking or reasoning_effort",
    )
    max_branches: int = Field(
        16,
        ge=1,
        description="token sequences that one rollout may become, where an agent rewrites its history, calls others or "
        "tries again; 1: a call that does not extend the one before is refused",
    )
    scoring: ScoringConfig = Field(
        default_factory=ScoringConfig, description="processes, deadlines and failures of scorers"
    )

    @property
    def cut(self) -> str | None:
        """The side at which long prompts are cut; None: they are not."""
        return self.long_prompts if self.long_prompts.startswith("cut") else None

    @property
    def shares(self) -> tuple[TaskShare, ...]:
        """The tasks that are trained; one of them where no mix is given."""
        trained = tuple(share for share in self.mix if not share.evaluation_only)
        return trained or (TaskShare(name=self.name, args=self.args),)

    @property
    def trained(self) -> tuple[TaskShare, ...]:
        """The tasks that tickets are issued for: those with a weight."""
        return tuple(share for share in self.shares if share.weight > 0)

    @property
    def evaluated(self) -> tuple[TaskShare, ...]:
        """The tasks of the mix that are for evaluation alone."""
        return tuple(share for share in self.mix if share.evaluation_only)

    @model_validator(mode="before")
    @classmethod
    def _file_becomes_the_mix(cls, values: Any) -> Any:
        """So that a run's own configuration holds its tasks, whatever later becomes of the file."""
        if not isinstance(values, dict) or values.get("file") is None:
            return values
        if values.get("mix"):
            raise ValueError("file: is not allowed beside mix; allowed: one of the two")
        return {**values, "file": None, "mix": read_entries(Path(values["file"]))}

    @rule
    def _each_reward_has_a_name(self) -> None:
        keys = [share.key for share in self.rewards]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"rewards: {key!r} is there twice; allowed: one entry for each label")

    @rule
    def _templates_have_variables_of_their_own(self) -> None:
        for name in self.chat_template_kwargs.keys() & OF_TEMPLATES:
            raise ValueError(
                f"chat_template_kwargs: {name!r} is what every template is given; allowed: other names than "
                f"{', '.join(sorted(OF_TEMPLATES))}"
            )

    @rule
    def _mix_is_clear(self) -> None:
        keys = [share.key for share in self.mix]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"mix: {key!r} is there twice; allowed: one entry for each label")
        if self.mix and not any(share.weight and not share.evaluation_only for share in self.mix):
            raise ValueError("mix: every weight of a trained task is 0; allowed: at least one above 0")
