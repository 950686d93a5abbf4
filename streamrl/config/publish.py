"""How new weights reach the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from streamrl.choices import TRANSPORTS
from streamrl.config.section import Section


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Annotated[str, TRANSPORTS] = Field("broadcast", description="how weights get to the servers")
    transport_options: dict[str, Any] = Field(default_factory=dict, description="options of a transport of your own")
    folder: Path | None = Field(
        None,
        description="of the disk transport, on a file system that all share; versions are in its folder `run.name`; "
        "null: RUN/published",
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
    mismatch: int = Field(
        0,
        ge=0,
        le=64,
        description="answers that learner and servers score with each version, to show how far apart they compute; "
        "0: none",
    )
