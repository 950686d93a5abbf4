"""Supervised fine-tuning (`streamrl sft`): which rows, and how they are trained. Everything else is as in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from streamrl.config.algo import AlgoConfig
from streamrl.config.section import Section, rule

# The loss of rows, whatever `algo` says of answers. Rows have no behaviour policy: with this proximal policy nothing is
# made of it, and `weight: none` is 1.
ALGO = AlgoConfig(loss="streamrl.algo.cross_entropy:CrossEntropy", proximal="interpolate", weight="none")


class SftDataConfig(Section):
    """Where the rows are, and what their columns are; names as in the `task.args` of a data set."""

    path: str | None = Field(
        None, description="file or pattern of files (.jsonl, .json, .parquet, .csv), or a data set's hub name"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; null: its main branch")
    subset: str | None = Field(None, description="configuration of a hub data set; null: its default")
    split: str = Field("train", description="split of a hub data set")
    test_path: str | None = Field(None, description="file of held-out rows, instead of a part of the others")
    test_split: str | None = Field(None, description="split of held-out rows of a hub data set, instead of a part")
    held_out: float = Field(0.05, gt=0, lt=1, description="share of the prompts that evaluate_every holds out")
    held_out_count: int | None = Field(None, ge=1, description="different prompts held out; null: held_out")
    cache: Path | None = Field(None, description="folder for converted data; null: that of the datasets library")
    prompt: str = Field("prompt", description="column of the prompts: text, or a list of chat messages")
    answer: str = Field("answer", description="column of the answers: text")
    messages: str | None = Field(
        None,
        description="column of conversations, instead of prompt and answer: the assistant's turns are answers",
    )
    system: str | None = Field(None, description="system message before a prompt that is text; null: none")
    suffix: str = Field("", description="text put behind a prompt that is text")
    chat: bool = Field(True, description="prompts go through the model's chat template; false: plain text")

    @rule
    def _turns_need_a_template(self) -> None:
        if not self.chat and (self.messages is not None or self.system is not None):
            key = "system" if self.messages is None else "messages"
            raise ValueError(f"{key}: {getattr(self, key)!r} needs the chat template; allowed: null, or chat=true")

    @rule
    def _a_conversation_is_whole(self) -> None:
        if self.messages is not None and (self.suffix or self.system is not None):
            key = "suffix" if self.system is None else "system"
            raise ValueError(
                f"{key}: {getattr(self, key)!r} is for prompts, and messages are whole; allowed: the default"
            )


class SftConfig(Section):
    """Rows of prompts and answers, trained with cross entropy."""

    data: SftDataConfig = Field(default_factory=SftDataConfig, description="the rows")
    batch: int = Field(32, ge=1, description="rows of a step")
    epochs: int | None = Field(None, ge=1, description="times that each row is trained; null: run.steps counts")
    train_on: Literal["answers", "all"] = Field(
        "answers", description="which tokens are trained: the answers with their ends, or all but the first"
    )
    max_row_tokens: int | None = Field(
        None, ge=2, description="tokens of a row; null: what a micro batch and the model's positions hold"
    )
    long_rows: Literal["leave_out", "cut"] = Field("leave_out", description="what is done with longer rows")
    evaluate_every: int = Field(
        0, ge=0, description="steps between two losses of held-out rows; 0: none, and no row is held out"
    )
