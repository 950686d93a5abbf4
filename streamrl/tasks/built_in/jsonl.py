"""The task `jsonl`: questions of a file, or of any data set of the hub."""

from __future__ import annotations

from streamrl.tasks.questions import Questions


class Jsonl(Questions):
    """Which columns and which reward: `task.args`."""
