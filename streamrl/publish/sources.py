"""Which source a run has, and where its versions are staged."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.device import detect
from streamrl.device_copy import copying
from streamrl.publish.staging import Staging
from streamrl.publish.transport import LearnerEnd, Source
from streamrl.publish.transports import transport_of


def make_staging(config: Config) -> Staging:
    """Where the configured transport's source finds versions, copied out of this process's device."""
    return Staging(config.publish.bucket, transport_of(config).memory(), copying(detect()))


def make_source(config: Config, run_folder: Path, service: str) -> Source:
    """The learner's end of the configured transport. `service`: the replay service's address."""
    return transport_of(config).source(LearnerEnd(config, run_folder, service))
