"""The reward model that is served beside: where it is, its processes, and how long a group waits for a score."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from streamrl.config.section import Section, rule


class RewardModelConfig(Section):
    """A sequence classifier that judges answers, in processes of its own."""

    path: Path | None = Field(
        None,
        description="Hugging Face folder of a sequence classifier (config.json, safetensors, tokenizer); null: none",
    )
    label: int | str | None = Field(
        None,
        description="which of several labels is the score, by number or by name in config.json; null: the only one",
    )
    chat_template: bool = Field(
        True,
        description="prompt and answer as a conversation through its folder's chat template, plain text as one user "
        "message; false: the text of the prompt and the answer, one behind the other",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of its weights")
    workers: int = Field(1, ge=1, description="processes, each with the whole model")
    gpus: int = Field(
        1, ge=0, description="GPUs of each process, over which its layers are spread, where there are GPUs; 0: cores"
    )
    threads: int = Field(1, ge=1, description="CPU threads of a process")
    host: str = Field("127.0.0.1", min_length=1, description="address at which a process listens, at a free port")
    tokens_per_batch: int = Field(
        16384,
        ge=1,
        description="tokens of one forward pass, padding included, and of the longest answer with its prompt",
    )
    batch_wait: float = Field(
        0.005, ge=0, description="seconds that the first answer of a batch waits for others to fill it"
    )
    most_waiting: int = Field(
        4096, ge=1, description="answers that wait in one process; further ones are refused, and asked for again later"
    )
    timeout: float = Field(60.0, gt=0, description="seconds that a process may take for a group's scores")
    retry: float = Field(
        1.0, gt=0, description="seconds after which a process that failed, was late or is full is asked again"
    )
    patience: float = Field(
        300.0, gt=0, description="seconds that a group waits in all until some process has scored it; then it is masked"
    )
    restarts: int = Field(3, ge=0, description="times that a process is started again after it died")

    @property
    def processes(self) -> int:
        """Those that a run starts."""
        return self.workers if self.path is not None else 0

    @rule
    def _patience_is_one_try_at_least(self) -> None:
        if self.patience < self.timeout:
            raise ValueError(
                f"patience: {self.patience:g} s end before one try of timeout={self.timeout:g} s; allowed: at least "
                f"{self.timeout:g}"
            )
