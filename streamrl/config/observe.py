"""Section `observe`: where metrics go besides the run folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from streamrl.choices import SINKS
from streamrl.config.section import Section


class ObserveConfig(Section):
    """Where metrics go besides RUN/metrics.jsonl."""

    console: bool = Field(True, description="live table in the terminal")
    wandb: Literal["off", "offline", "online"] = Field("off", description="Weights & Biases")
    wandb_project: str = Field("streamrl", description="project at Weights & Biases")
    wandb_answers: int = Field(
        25, ge=0, description="steps between two tables of prompts, answers and rewards at Weights & Biases; 0: none"
    )
    tensorboard: bool = Field(False, description="event files in RUN/tensorboard")
    sink: Annotated[str | None, SINKS] = Field(None, description="a further sink, such as one of your own; null: none")
    sink_options: dict[str, Any] = Field(default_factory=dict, description="options of a sink of your own")
    prometheus_port: int = Field(0, ge=0, le=65535, description="port of the Prometheus endpoint; 0: none")
    prometheus_host: str = Field(
        "127.0.0.1", min_length=1, description="address of the Prometheus endpoint, which asks nobody who they are"
    )
