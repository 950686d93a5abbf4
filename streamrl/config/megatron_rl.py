"""The agents of Megatron-RL's examples in a task file: which there are, what they take, and which task does the same.

DAPOAgent, examples.rl.environments.math.dapo_agent:DAPOAgent  ─▶ the task `megatron_rl` with that agent
RemoteAgent                                                    ─▶ a task that asks an environment server
mine.py:MyAgent, package.module:MyAgent, package.module.MyAgent ─▶ a class of the user's
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamrl.choices import PATHS, TASKS
from streamrl.config.words import checked

AgentName = Literal["DAPOAgent", "AIMEAgent", "GSM8KAgent", "OpenMathInstructAgent", "BigMathAgent", "CountdownAgent"]
AGENTS = ("DAPOAgent", "AIMEAgent", "GSM8KAgent", "OpenMathInstructAgent", "BigMathAgent", "CountdownAgent")

# Classes of streamrl that are called by a path.
CLASSES = {"RemoteAgent": "streamrl.tasks.megatron_rl.remote_agent:RemoteAgent"}

TASK = "megatron_rl"

# Where Megatron-RL has its own agents: a path into these is the name of one.
_THEIRS = re.compile(r"(?:examples\.rl\.environments|megatron\.rl\.agent)\.[\w.]*?(\w+)")

_DOTTED = re.compile(r"([A-Za-z_][\w.]*)\.([A-Za-z_]\w*)")


class AgentArguments(BaseModel):
    """What `agent_args` of an agent of the examples may hold, and the task `megatron_rl` takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    answer_format: Literal["tagged", "boxed"] | None = Field(
        None, description="what the prompt asks for: <answer> tags or a box; null: a box for GSM8KAgent, tags else"
    )
    format_reward: float | None = Field(
        None, description="reward of a wrong answer, and of a cut text; null: 0.1 for CountdownAgent, 0 else"
    )
    negative_reward: float = Field(0.0, description="reward of a text without an answer")
    partial_end_reward: float = Field(0.0, description="reward of a right answer with text behind it")
    hf_dataset_name: str | None = Field(
        None, description="hub name of the data set, or a file with its columns; null: that of the agent"
    )
    dataset_file: Path | None = Field(None, description="folder of a data set's Arrow files, instead of the hub")
    split: str | None = Field(None, description="split of the data set; null: train")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    env_id: str | None = Field(None, pattern=r"^[\w.-]+$", description="label of the task; null: the agent's name")


def entry(agent_type: str, args: dict[str, Any]) -> dict[str, Any]:
    """Name, label and arguments, as `task.mix` has them. Raises ConfigError with lines that begin with the key."""
    theirs = _THEIRS.fullmatch(agent_type.replace(":", "."))
    agent = theirs[1] if theirs else agent_type
    if agent in AGENTS:
        given = checked(AgentArguments, args, "agent_args").model_dump(mode="json", exclude_unset=True)
        return {"name": TASK, "label": given.pop("env_id", None) or agent, "args": {"agent": agent, **given}}
    if agent in CLASSES:
        return {"name": CLASSES[agent], "label": args.get("env_id") or agent, "args": args}
    if theirs is None and ":" in agent_type:
        return {"name": agent_type, "args": args}
    if theirs is None and (dotted := _DOTTED.fullmatch(agent_type)):
        return {"name": f"{dotted[1]}:{dotted[2]}", "args": args}
    if agent not in TASKS.names:
        known = ", ".join((*AGENTS, *CLASSES, *TASKS.names))
        raise ValueError(f"agent_type: {agent_type} is not allowed; allowed: one of {known}, {PATHS}")
    return {"name": agent, "args": args}
