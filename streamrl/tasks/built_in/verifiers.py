"""The task `verifiers`: an environment of the library verifiers, in that library's own virtual environment."""

from __future__ import annotations

from streamrl.tasks.played import Played


class Verifiers(Played):
    """Its data set, its rollouts and its rubric; each function of the rubric is a reward part."""

    library = "verifiers"
