"""How new weights reach the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from streamrl.config.section import Section


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["broadcast", "disk"] = Field(
        "broadcast", description="gloo or NCCL broadcast of flattened buckets, or a folder that all of them see"
    )
    folder: Path | None = Field(
        None, description="of the disk transport, on a file system that all share; null: RUN/published"
    )
    every: int = Field(1, ge=1, description="k, learner steps between two published versions")
    interruption: Literal["retract", "in_place", "drain", "abort"] = Field(
        "retract", description="what happens to requests in flight (not with adapters)"
    )
    bucket: int = Field(256 << 20, ge=1 << 10, description="bytes of one flattened bucket (not with adapters)")
    timeout: float = Field(120.0, gt=0, description="seconds that one server may take to receive a version")
    keep_every: int = Field(0, ge=0, description="versions kept in RUN/weights for the audit: every Nth; 0: none")

    @model_validator(mode="after")
    def _a_folder_is_used(self) -> PublishConfig:
        if self.folder is not None and self.transport != "disk":
            raise ValueError(
                f"folder: {self.folder} is not used by transport={self.transport}; allowed: null, or transport=disk"
            )
        return self
