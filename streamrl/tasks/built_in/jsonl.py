"""The task `jsonl`: questions of a file, or of any data set of the hub."""

from __future__ import annotations

from streamrl.tasks.questions import Questions
from streamrl.tasks.starter import BACKWARDS_ARGS, BACKWARDS_FILES, Starter


class Jsonl(Questions):
    """Which columns and which reward: `task.args`."""

    starter = Starter(args=BACKWARDS_ARGS, files=BACKWARDS_FILES, shown=("chat", "template", "system", "held_out"))
