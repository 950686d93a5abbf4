"""How new weights reach the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamrl.config.section import Section


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["broadcast"] = Field("broadcast", description="gloo or NCCL broadcast of flattened buckets")
    every: int = Field(1, ge=1, description="k, learner steps between two published versions")
    interruption: Literal["retract", "in_place"] = Field(
        "retract", description="what happens to requests in flight (not with adapters)"
    )
    bucket: int = Field(256 << 20, ge=1 << 10, description="bytes of one flattened bucket (not with adapters)")
    timeout: float = Field(120.0, gt=0, description="seconds that one server may take to receive a version")
    keep_every: int = Field(0, ge=0, description="versions kept in RUN/weights for the audit: every Nth; 0: none")
