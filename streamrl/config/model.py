"""Section `model`: which model is trained, and of whose layers it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from streamrl.choices import FAMILIES
from streamrl.config.section import Section

# The family of every model that transformers builds.
TRANSFORMERS = "streamrl.learner.whole.family:Transformers"


class ModelConfig(Section):
    """The model that is trained and generates."""

    path: Path = Field(
        Path("models/tiny"),
        description="Hugging Face folder (config.json, safetensors, tokenizer), or else a name of the hub (`org/name`)",
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a model of the hub; null: its main branch"
    )
    cache: Path | None = Field(None, description="folder for models of the hub; null: the hub's own cache")
    hub_timeout: float = Field(
        60.0, gt=0, description="seconds without a byte from the hub after which fetching is given up"
    )
    shape: Path | None = Field(None, description="its config.json under any name, for `streamrl plan` without `path`")
    implementation: Literal["megatron", "transformers"] = Field(
        "megatron",
        description="whose layers the learner's models are made of: Megatron-Core's, or transformers' own class, which "
        "may be of any architecture and is whole on every rank",
    )
    family: Annotated[str | None, FAMILIES] = Field(
        None, description="how it is built and what its tensors are called; null: by the architecture in config.json"
    )
    family_options: dict[str, Any] = Field(default_factory=dict, description="options of a family of your own")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the weights in learner and server; auto: bfloat16 on GPUs and on CPUs with instructions "
        "for it, else float32, as the machine has it that makes the run folder",
    )
    trust_remote_code: Literal[False] = Field(False, description="code from a model folder is never run")

    @property
    def built_by(self) -> str | None:
        """The family by which the policy is read and built; None: that of its architecture."""
        return self.builder(self.family)

    def builder(self, family: str | None) -> str | None:
        """What builds a model beside the policy, whose own key says `family`; see `built_by`."""
        return TRANSFORMERS if self.implementation == "transformers" else family
