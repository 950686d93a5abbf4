"""A Hugging Face folder a version, on a file system that all share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from streamrl.publish.transports.base import Costs, Times, Transport

if TYPE_CHECKING:
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


class Disk(Transport):
    """A folder on a file system that learner, workers and servers see under one path."""

    over_nodes = True
    several_at_once = True
    spares_drafts = False  # SGLang 0.5.23 loads a folder into both, and cannot be told otherwise
    uses = frozenset({"folder"})
    verifies = "every version's checksum"

    def source(self, at: LearnerEnd) -> Source:
        from streamrl.publish.disk_source import DiskSource

        folder = at.config.publish.folder
        root = folder / at.config.run.name if folder else at.run_folder / "published"
        return DiskSource(root, at.config.model.path, is_shared=folder is not None)

    def sink(self, at: ServerEnd) -> Sink:
        from streamrl.publish.disk_sink import DiskSink

        return DiskSink(at.client, at.update, at.timeout)

    def times(self, costs: Costs) -> Times:
        """Written and hashed once; each server's worker reads and hashes it, then the server reads it, mapped."""
        turns = math.ceil(costs.servers / costs.at_once)
        round_ = costs.read + costs.hash + 2 * costs.servers * costs.read + turns * (costs.hash + costs.pageable)
        return Times(costs.copy, costs.read * costs.at_once + costs.pageable, round_)
