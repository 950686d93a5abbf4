"""How new weights reach the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from streamrl.config.section import Section


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["broadcast", "disk", "memory", "delta"] = Field(
        "broadcast",
        description="gloo or NCCL broadcast of flattened buckets, a folder that all of them see, memory of one host, "
        "or what changed since the version before",
    )
    folder: Path | None = Field(
        None, description="of the disk transport, on a file system that all share; null: RUN/published"
    )
    every: int = Field(1, ge=1, description="k, learner steps between two published versions")
    interruption: Literal["retract", "in_place", "drain", "abort"] = Field(
        "retract", description="what happens to requests in flight (not with adapters)"
    )
    bucket: int = Field(256 << 20, ge=1 << 10, description="bytes of one flattened bucket (not with adapters)")
    at_once: int = Field(1, ge=1, description="servers that get a version at the same time (memory and disk)")
    timeout: float = Field(120.0, gt=0, description="seconds that one server may take to receive a version")
    keep_every: int = Field(0, ge=0, description="versions kept in RUN/weights for the audit: every Nth; 0: none")

    verify_every: int = Field(
        0, ge=0, description="servers compare the checksums of every Nth version before they load it; 0: of none"
    )

    @model_validator(mode="after")
    def _servers_fetch_for_themselves(self) -> PublishConfig:
        if self.at_once > 1 and self.transport in ("broadcast", "delta"):
            raise ValueError(
                f"at_once: {self.at_once} is not possible with transport={self.transport}, whose bytes go to one "
                "server after another; allowed: 1, or transport=memory or disk"
            )
        return self

    @model_validator(mode="after")
    def _verification_is_made(self) -> PublishConfig:
        if self.verify_every and self.transport in ("broadcast", "disk"):
            raise ValueError(
                f"verify_every: {self.verify_every} is not used by transport={self.transport} (disk compares every "
                "version's checksum); allowed: 0, or transport=memory or delta"
            )
        return self

    @model_validator(mode="after")
    def _a_folder_is_used(self) -> PublishConfig:
        if self.folder is not None and self.transport != "disk":
            raise ValueError(
                f"folder: {self.folder} is not used by transport={self.transport}; allowed: null, or transport=disk"
            )
        return self
